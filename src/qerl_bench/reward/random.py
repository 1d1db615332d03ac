"""reward=random: rewards that say nothing about the answer, the control of spurious rewards (arXiv 2506.10947).

Completions are still graded, so that `accuracy` and the parts of the reward stay true.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qerl_bench.algo.base import Algorithm
from qerl_bench.reward.base import refuse_demonstrations
from qerl_bench.task.base import Task
from qerl_core.checks import check_fields, number
from qerl_core.records import Reward, Rollout
from qerl_core.seeding import BITS, derive


@dataclass(frozen=True, kw_only=True)
class RandomReward:
    """1 with probability `p`, else 0, drawn by (run seed, step, prompt and its occurrence, sample)."""

    name: str
    p: float

    def __post_init__(self) -> None:
        check_fields(self, "reward", p=number(above=0, below=1))

    def check_with(self, algo: Algorithm) -> None:
        refuse_demonstrations("reward=random", algo)

    def check(self, task: Task) -> None:
        """Needs nothing."""

    def rewards(self, task: Task, rollouts: list[Rollout], seed: int) -> list[Reward]:
        graded = task.rewards(rollouts)
        return [
            replace(reward, total=float(derive(seed, rollout.prompt.draw, rollout.sample) < self.p * 2**BITS))
            for rollout, reward in zip(rollouts, graded, strict=True)
        ]
