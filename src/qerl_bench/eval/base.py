"""The Evaluator protocol: scores of the policy without noise on held-out questions, each with a standard error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from qerl_bench.parallel import ALONE, World
from qerl_bench.task.base import Task
from qerl_core.statistics import Estimate

if TYPE_CHECKING:
    from qerl_bench.engine.base import RolloutEngine
    from qerl_bench.model.policy import Policy
    from qerl_core.rundir.run_dir import RunDir

DETAILS = ("stderr", "stderr_questions", "stderr_sampling", "truncated", "format_failed")


def with_error(value: float, stderr: float | None, form: str = ".3f") -> str:
    """A number and its standard error, if it has one."""
    return format(value, form) + ("" if stderr is None else f" +- {format(stderr, form.lstrip('+'))}")


@dataclass(frozen=True, kw_only=True)
class Score:
    """One number of an evaluation; None means not measured. `stderr` is over questions, because samples of one question
    are not independent; a single question has none. An accuracy has the shares of completions cut at the token limit
    (`truncated`) and without an answer (`format_failed`)."""

    metric: str  # as in metrics.jsonl
    value: float
    stderr: float | None
    n: int  # questions
    stderr_questions: float | None = None
    stderr_sampling: float | None = None
    truncated: float | None = None  # share of completions
    format_failed: float | None = None  # share of completions

    @classmethod
    def from_estimate(cls, metric: str, estimate: Estimate, **shares: float) -> Score:
        return cls(
            metric=metric,
            value=estimate.value,
            stderr=estimate.known_stderr,
            n=estimate.n,
            stderr_questions=estimate.stderr_questions,
            stderr_sampling=estimate.stderr_sampling,
            **shares,
        )

    def __str__(self) -> str:
        return f"{self.metric.removeprefix('eval/')} {with_error(self.value, self.stderr)}"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The scores of one policy, one row per question and sample, and the settings."""

    scores: list[Score] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


class Evaluator(Protocol):
    """An evaluation option."""

    @property
    def name(self) -> str: ...

    def check(self, task: Task) -> None:
        """Raise ConfigError if this evaluation cannot run here or on this task. Called before training."""

    def evaluate(
        self, policy: Policy, engine: RolloutEngine, task: Task, run: RunDir, seed: int, world: World = ALONE
    ) -> Evaluation | None:
        """Evaluate the policy as it is now, without noise; None if there is nothing to evaluate.

        All ranks of `world` call this and return the same.
        """
        ...


def metrics_of(scores: list[Score]) -> dict[str, float]:
    """Each score under its name, and its details, as far as they are known, under <name>_stderr and so on."""
    metrics = {score.metric: score.value for score in scores}
    for score in scores:
        details = {f"{score.metric}_{name}": getattr(score, name) for name in DETAILS}
        metrics |= {name: value for name, value in details.items() if value is not None}
    return metrics
