"""eval=task: the task's held-out questions, judged by its own reward; greedy once and sampled several times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qerl_bench.checks import positive, require, require_completions, require_count, temperature
from qerl_bench.engine.base import Sampling
from qerl_bench.eval.adapter_check import adapter_probe
from qerl_bench.eval.base import Evaluation, Score
from qerl_bench.metrics import mean
from qerl_bench.records import Prompt, Rollout
from qerl_bench.seeding import derive
from qerl_bench.statistics import majority, over_samples, pass_at_k
from qerl_bench.task.base import Task

if TYPE_CHECKING:
    from qerl_bench.engine.base import RolloutEngine
    from qerl_bench.model.policy import Policy
    from qerl_bench.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class TaskEvaluation:
    """Accuracy on held-out questions: greedy, mean over samples (pass@1), maj@n of all samples, and pass@k.

    The sampling seeds are the same at every evaluation, and so are the questions: differences are paired.
    """

    name: str
    questions: int | None
    samples: int
    k: int | None
    temperature: float
    top_p: float
    max_tokens: int | None

    def __post_init__(self) -> None:
        if self.questions is not None:
            require_count("eval.questions", self.questions)
        if self.max_tokens is not None:
            require_count("eval.max_tokens", self.max_tokens)
        require_count("eval.samples", self.samples)
        if self.k is not None:
            require_count("eval.k", self.k)
        require(
            (self.k or 1) <= self.samples,
            f"eval.k={self.k} asks for pass@k of eval.samples={self.samples} completions; k can be at most that many",
        )
        require_completions("eval.questions x eval.samples", self.questions or 1, self.samples)
        temperature("eval.temperature", self.temperature)
        positive("eval.top_p", self.top_p)
        require(self.top_p <= 1, f"eval.top_p must be above 0 and at most 1 (1 = all tokens), got {self.top_p}")

    def check(self, task: Task) -> None:
        """Raise ConfigError unless the task has so many held-out questions."""
        task.eval_prompts(self.questions)

    def evaluate(self, policy: Policy, engine: RolloutEngine, task: Task, run: RunDir, seed: int) -> Evaluation:
        prompts = task.eval_prompts(self.questions)
        limit = self.max_tokens or task.max_completion_tokens
        k = self.k or self.samples
        scores: list[Score] = []
        rows: list[dict[str, Any]] = []
        probe: dict[str, float] = {}
        decoding = (("greedy", 1, 0.0, 1.0), ("sampled", self.samples, self.temperature, self.top_p))
        for mode, samples, temperature, top_p in decoding:
            sampling = Sampling(
                samples=samples,
                temperature=temperature,
                max_tokens=limit,
                seed=derive(seed, "eval", mode),
                top_p=top_p,
            )
            rollouts = engine.generate(prompts, sampling)
            judged = judge(task, rollouts, mode)
            scores += scored(judged, mode, samples, k)
            rows += judged
            # Greedy tokens are near certain with and without the adapter, so sampled ones show it better; but with
            # top-p an engine may report log-probabilities of the tokens kept.
            if top_p == 1:
                probe = adapter_probe(policy, rollouts, temperature or 1.0)
        settings = {
            "samples": self.samples,
            "k": k,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": limit,
        }
        return Evaluation(scores=scores, samples=rows, settings=settings | probe)


def judge(task: Task, rollouts: Sequence[Rollout], mode: str) -> list[dict[str, Any]]:
    """One row for each rollout: what was asked and answered, and every part of the reward in a column of its own."""
    rows = []
    for rollout in rollouts:
        reward = task.reward(rollout.prompt, rollout.text)
        rows.append(
            {
                **asked(mode, rollout.prompt, rollout.sample),
                "correct": reward.correct,
                "reward": reward.total,
                **{f"reward_{part}": value for part, value in reward.parts.items()},
                "answer": reward.answer,
                "completion": rollout.text,
                "tokens": len(rollout.token_ids),
                "finished": rollout.finished,
            }
        )
    return rows


def asked(mode: str, prompt: Prompt, sample: int) -> dict[str, Any]:
    """The columns of samples.parquet by which a row is found again."""
    return {"mode": mode, "question": prompt.id, "sample": sample, "gold": prompt.answer}


def scored(rows: list[dict[str, Any]], mode: str, samples: int, k: int) -> list[Score]:
    """The scores of `rows`, the `samples` of one question side by side; maj@n and pass@k of sampled ones only."""
    found = [accuracy(f"eval/accuracy_{mode}", rows, samples)]
    if mode == "sampled":
        correct, answers = by_question(rows, "correct", samples), by_question(rows, "answer", samples)
        found += [
            Score.of("eval/majority", majority(answers, correct)),
            Score.of("eval/pass_at_k", pass_at_k(correct, k)),
        ]
    return found


def accuracy(metric: str, rows: list[dict[str, Any]], samples: int) -> Score:
    """Mean over questions of the mean over samples, with the shares that were cut or hold no answer."""
    return Score.of(
        metric,
        over_samples(by_question(rows, "correct", samples)),
        truncated=mean([float(not row["finished"]) for row in rows]),
        format_failed=mean([float(row["answer"] is None) for row in rows]),
    )


def by_question(rows: list[dict[str, Any]], column: str, samples: int) -> list[list[Any]]:
    """(questions, samples) of one column."""
    values = [row[column] for row in rows]
    return [values[i : i + samples] for i in range(0, len(values), samples)]
