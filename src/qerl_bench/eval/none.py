"""eval=none: train only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.eval.base import Evaluation
from qerl_bench.parallel import ALONE, World
from qerl_bench.task.base import Task

if TYPE_CHECKING:
    from qerl_bench.engine.base import RolloutEngine
    from qerl_bench.model.policy import Policy
    from qerl_core.rundir.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class NoEvaluation:
    """Evaluates nothing."""

    name: str

    def check(self, task: Task) -> None:
        """Works with every task."""

    def evaluate(
        self, policy: Policy, engine: RolloutEngine, task: Task, run: RunDir, seed: int, world: World = ALONE
    ) -> Evaluation | None:
        return None
