"""What a noise schedule is: a standard deviation for every step of a run. How the noise goes in is `injection.py`.

A schedule is a frozen spec; `controller` makes what runs it. Most schedules are functions of the step alone (open loop);
one that reacts to what it sees brings its own controller, whose state travels in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from qerl_bench.aqn.spec import NoiseSpec
    from qerl_bench.model.policy import Policy
    from qerl_bench.quant.base import WeightFormat


class SigmaController(Protocol):
    """A schedule at work in one run."""

    @property
    def factors(self) -> Mapping[str, float]:
        """For each norm, by its name in the model, what sigma is multiplied by there; norms left out have 1."""
        ...

    def sigma(self, step: int) -> float:
        """Noise standard deviation of step `step`; 0.0 means no noise."""
        ...

    def observe(self, step: int, entropy: float) -> dict[str, float]:
        """Hear the entropy (nats/token) of the policy that sampled `step`; return metrics of the decision, if any."""
        ...

    def state(self) -> dict[str, float]:
        """What `restore` needs to continue after a checkpoint."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Schedule:
    """A schedule that depends on the step alone: implement `sigma`. The rest is for those that need more."""

    name: str

    def sigma(self, step: int, total_steps: int) -> float:
        """Noise standard deviation for step `step`, counted 1..total_steps; 0.0 means no noise."""
        raise NotImplementedError

    def check_with(self, quant: WeightFormat, injection: NoiseSpec) -> None:
        """Raise ConfigError if this schedule makes no sense with that format or that way of injecting."""

    def controller(self, policy: Policy, total_steps: int) -> SigmaController:
        """What runs this schedule over the norms of `policy`."""
        return OpenLoop(self, total_steps)


class OpenLoop:
    """SigmaController that looks at nothing: sigma(step) of a schedule, the same or in fixed proportion for every norm."""

    def __init__(self, schedule: Schedule, total_steps: int, factors: Mapping[str, float] | None = None) -> None:
        self.schedule = schedule
        self.total_steps = total_steps
        self.factors: Mapping[str, float] = factors or {}

    def sigma(self, step: int) -> float:
        return self.schedule.sigma(step, self.total_steps)

    def observe(self, step: int, entropy: float) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, float]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """There is nothing to restore."""


def stage_of(step: int, total_steps: int, stages: int) -> int:
    """Index 0..stages-1 of the equal part of the run that `step` (1..total_steps) falls into."""
    return (step - 1) * stages // total_steps
