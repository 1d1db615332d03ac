"""What an evaluation is: held-out questions answered by the clean policy, with a standard error on every number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from qerl_bench.task.base import Task

if TYPE_CHECKING:
    from qerl_bench.engine.base import RolloutEngine
    from qerl_bench.policy import Policy
    from qerl_bench.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class Score:
    """One number of an evaluation. `stderr` is over questions: samples of one question are not independent."""

    metric: str  # as in metrics.jsonl
    value: float
    stderr: float
    n: int  # questions


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The scores of one policy, one row per question and sample, and what was set."""

    scores: list[Score] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """The scores as metrics.jsonl names them."""
        values = {score.metric: score.value for score in self.scores}
        return values | {f"{score.metric}_stderr": score.stderr for score in self.scores}


class Evaluator(Protocol):
    """An evaluation option."""

    @property
    def name(self) -> str: ...

    def check(self) -> None:
        """Raise BadInput if this evaluation cannot run here; called before training."""

    def evaluate(self, policy: Policy, engine: RolloutEngine, task: Task, run: RunDir, seed: int) -> Evaluation | None:
        """Evaluate the policy as it is now, without noise. None means: nothing to evaluate."""
        ...


def score(metric: str, per_question: list[float]) -> Score:
    """Mean over questions with its standard error (n - 1)."""
    from qerl_bench.metrics import mean, sample_std

    n = len(per_question)
    return Score(metric=metric, value=mean(per_question), stderr=sample_std(per_question) / n**0.5, n=n)
