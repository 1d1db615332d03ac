"""The RewardSource protocol: what training rewards. Evaluations ask the task and are not affected."""

from __future__ import annotations

from typing import Protocol

from qerl_bench.algo.base import Algorithm
from qerl_bench.task.base import Task
from qerl_core.checks import require
from qerl_core.records import Reward, Rollout


class RewardSource(Protocol):
    """A reward option."""

    @property
    def name(self) -> str: ...

    def check_with(self, algo: Algorithm) -> None:
        """Raise ConfigError if `algo` cannot use these rewards."""

    def check(self, task: Task) -> None:
        """Raise ConfigError if what the rewards need is missing or does not work. Called before training."""

    def rewards(self, task: Task, rollouts: list[Rollout], seed: int) -> list[Reward]:
        """One reward for each training completion; `seed` is that of the step."""
        ...


def refuse_demonstrations(choice: str, algo: Algorithm) -> None:
    """Raise ConfigError if `algo` trains on demonstrations, which the rewards of `choice` are not for."""
    require(
        algo.on_policy,
        f"{choice} replaces the rewards of completions, and algo={algo.name} trains on demonstrations. Use "
        "reward=task, or an algorithm such as algo=grpo",
    )
