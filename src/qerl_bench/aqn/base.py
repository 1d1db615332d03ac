"""What a noise schedule is: a standard deviation for every step. `aqn/injector.py` puts the noise into the model.

A schedule is a frozen spec; `controller` makes the object that runs it. Most schedules depend on the step alone (open
loop). A schedule that reacts to the policy brings its own controller, whose state is saved in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, Protocol

from qerl_bench.aqn.norm_errors import NormErrors
from qerl_bench.aqn.spec import NoiseSpec
from qerl_bench.quant.base import WeightFormat
from qerl_core.checks import require


class SigmaController(Protocol):
    """Decides sigma in every step of one run."""

    @property
    def per_norm_scale(self) -> Mapping[str, float]:
        """Factor on sigma for each norm, by its name in the model; 1 for norms that are not named."""
        ...

    def sigma(self, step: int) -> float:
        """Noise standard deviation of step `step`; 0.0 means no noise."""
        ...

    def update(self, step: int, entropy: float) -> dict[str, float]:
        """React to the entropy (nats/token) of the policy that sampled `step`; return metrics of the decision."""
        ...

    def state(self) -> dict[str, float]:
        """What `restore` needs to continue after a checkpoint."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Schedule:
    """A noise schedule. A subclass that depends on the step alone implements `sigma` and nothing else."""

    name: str

    @property
    def error_format(self) -> WeightFormat | None:
        """The format whose error on the base weights the schedule needs to know; None for the run's own format."""
        return None

    def sigma(self, step: int, total_steps: int) -> float:
        """Noise standard deviation of step `step`, counted 1..total_steps; 0.0 means no noise."""
        raise NotImplementedError

    def check_with(self, quant: WeightFormat, noise: NoiseSpec) -> None:
        """Raise ConfigError if this schedule cannot work with that weight format or those noise options."""

    def controller(self, norm_errors: NormErrors, total_steps: int) -> SigmaController:
        """The object that runs this schedule over the norms of a model."""
        return OpenLoop(self, total_steps)


class OpenLoop:
    """Follows a schedule and ignores the policy; every norm gets the same sigma or a fixed multiple of it.

    Raises ConfigError for a schedule that has a step without a finite sigma of at least 0.
    """

    def __init__(self, schedule: Schedule, total_steps: int, per_norm_scale: Mapping[str, float] | None = None) -> None:
        for step in range(1, total_steps + 1):
            sigma = schedule.sigma(step, total_steps)
            require(
                isinstance(sigma, Real) and math.isfinite(sigma) and sigma >= 0,
                f"aqn={schedule.name} has sigma={sigma!r} in step {step} of {total_steps}: a standard deviation is a "
                "finite number of at least 0; change its options or its class",
            )
        self.schedule = schedule
        self.total_steps = total_steps
        self.per_norm_scale: Mapping[str, float] = per_norm_scale or {}

    def sigma(self, step: int) -> float:
        return float(self.schedule.sigma(step, self.total_steps))  # a class of one's own may give NumPy's

    def update(self, step: int, entropy: float) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, float]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """There is no state."""


def stage_of(step: int, total_steps: int, stages: int) -> int:
    """Index 0..stages-1 of the stage of step `step` (1..total_steps); all stages are equally long."""
    return (step - 1) * stages // total_steps
