"""reward=task: the task's own reward."""

from __future__ import annotations

from dataclasses import dataclass

from qerl_bench.algo.base import Algorithm
from qerl_bench.task.base import Task
from qerl_core.records import Reward, Rollout


@dataclass(frozen=True, kw_only=True)
class TaskReward:
    """Rewards what the task's grader says."""

    name: str

    def check_with(self, algo: Algorithm) -> None:
        """Works with every algorithm."""

    def check(self, task: Task) -> None:
        """Needs nothing."""

    def rewards(self, task: Task, rollouts: list[Rollout], seed: int) -> list[Reward]:
        return task.rewards(rollouts)
