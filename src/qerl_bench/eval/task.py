"""eval=task: the task's held-out questions, graded by its own reward, with greedy and with sampled completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qerl_bench.engine.adapter_check import check_completions
from qerl_bench.engine.base import Sampling
from qerl_bench.eval.base import Evaluation, Score
from qerl_bench.eval.majority import majority
from qerl_bench.parallel import ALONE, World
from qerl_bench.quant.base import KEYS_AND_VALUES
from qerl_bench.task.base import Task, held_out
from qerl_bench.task.graded import reward_of
from qerl_bench.task.prompt_task import PromptTask
from qerl_core.checks import (
    Check,
    check_fields,
    count,
    flag,
    is_texts,
    number,
    one_of,
    optional,
    require,
    require_completions,
    temperature,
    text,
)
from qerl_core.metrics.compute import mean
from qerl_core.records import Prompt, Rollout
from qerl_core.seeding import derive
from qerl_core.statistics import over_samples, pass_at_k

if TYPE_CHECKING:
    from qerl_bench.engine.base import RolloutEngine
    from qerl_bench.model.policy import Policy
    from qerl_core.rundir.run_dir import RunDir

STEPS = Check(
    lambda value: isinstance(value, Sequence) and all(isinstance(step, int) and step > 0 for step in value),
    "a list of steps, such as [20,32,36]",
)
FORMATS = Check(is_texts, "a list of weight formats, such as [bf16,nvfp4+gptq]")
Decoding = tuple[str, int, float, float]  # mode, samples, temperature, top-p


@dataclass(frozen=True, kw_only=True)
class TaskEvaluation:
    """Accuracy on held-out questions: greedy, mean over samples (pass@1), maj@n of all samples, and pass@k.

    Questions and sampling seeds are the same at every evaluation, so differences are paired.
    """

    name: str
    questions: int | None
    samples: int
    k: int | None
    temperature: float
    top_p: float
    max_tokens: int | None
    at: Sequence[int]
    at_greedy: bool
    every: int | None
    every_questions: int
    quant: str | None
    quantizer: str | None
    kv: str | None
    also: Sequence[str]

    def __post_init__(self) -> None:
        check_fields(
            self,
            "eval",
            questions=optional(count()),
            samples=count(),
            k=optional(count()),
            temperature=temperature,
            top_p=number(above=0, most=1),
            max_tokens=optional(count()),
            at=STEPS,
            at_greedy=flag,
            every=optional(count(0)),
            every_questions=count(),
            quant=optional(text),
            quantizer=optional(text),
            kv=optional(one_of(*KEYS_AND_VALUES)),
            also=FORMATS,
        )
        require(
            (self.k or 1) <= self.samples,
            f"eval.k={self.k} (of pass@k) must be at most eval.samples={self.samples}",
        )
        require_completions("eval.questions x eval.samples", self.questions or 1, self.samples)

    @property
    def decoding(self) -> tuple[Decoding, ...]:
        return ("greedy", 1, 0.0, 1.0), ("sampled", self.samples, self.temperature, self.top_p)

    def after(self, step: int) -> TaskEvaluation:
        """The evaluation after a step of a run: without greedy completions if `at` has it and `at_greedy` is false."""
        return self if self.at_greedy or step not in self.at else SampledEvaluation(**vars(self))

    def check(self, task: Task) -> None:
        """Raise ConfigError unless the task has `questions` different held-out questions."""
        held_out(task, self.questions)

    def evaluate(
        self, policy: Policy, engine: RolloutEngine, task: Task, run: RunDir, seed: int, world: World = ALONE
    ) -> Evaluation:
        prompts = task.eval_prompts(self.questions)
        limit = self.max_tokens or task.max_completion_tokens
        rows: list[dict[str, Any]] = []
        adapter_gaps: dict[str, float] = {}
        for mode, samples, sampling_temperature, top_p in self.decoding:
            sampling = Sampling(
                samples=samples,
                temperature=sampling_temperature,
                max_tokens=limit,
                seed=derive(seed, "eval", mode),
                top_p=top_p,
            )
            rollouts = engine.generate(prompts, sampling)
            rows += world.split(lambda share, mode=mode: grade_rollouts(task, share, mode), rollouts)
            # Sampled tokens show the adapter better than greedy ones, which are almost certain with and without it. But
            # with top-p an engine may report log-probabilities over the kept tokens only.
            if top_p == 1:
                adapter_gaps = check_completions(policy, rollouts, sampling_temperature or 1.0)
        settings = {
            "samples": self.samples,
            "k": self.k or self.samples,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": limit,
        }
        return Evaluation(scores=self.scores(rows, len(prompts)), samples=rows, settings=settings | adapter_gaps)

    def scores(self, rows: Sequence[dict[str, Any]], questions: int) -> list[Score]:
        """The scores of the rows of samples.parquet. Raises ValueError unless each decoding has all of `questions`."""
        scores: list[Score] = []
        for mode, samples, _, _ in self.decoding:
            graded = [row for row in rows if row["mode"] == mode]
            if len(graded) != questions * samples:
                raise ValueError(f"{len(graded)} rows of {mode}, and {questions} questions have {samples} samples each")
            scores += scores_of(graded, mode, samples, self.k or self.samples)
        return scores


class SampledEvaluation(TaskEvaluation):
    """The same without greedy completions."""

    @property
    def decoding(self) -> tuple[Decoding, ...]:
        return super().decoding[1:]


class GreedyEvaluation(TaskEvaluation):
    """The same without sampled completions."""

    @property
    def decoding(self) -> tuple[Decoding, ...]:
        return super().decoding[:1]


def grade_rollouts(task: Task, rollouts: Sequence[Rollout], mode: str) -> list[dict[str, Any]]:
    """One row of samples.parquet for each rollout, with a column for each part of the reward.

    `lenient` says whether the end of the text is right, whatever its format: only of tasks with an answer format, and
    None where nothing can be compared.
    """
    rows = []
    for rollout in rollouts:
        reward = reward_of(task, rollout.prompt, rollout.text, rollout.finished)
        rows.append(
            {
                **sample_key(mode, rollout.prompt, rollout.sample),
                "correct": reward.correct,
                **lenient_column(task, rollout),
                "reward": reward.total,
                **{f"reward_{part}": value for part, value in reward.parts.items()},
                "answer": reward.answer,
                "completion": rollout.text,
                "tokens": len(rollout.token_ids),
                "finished": rollout.finished,
            }
        )
    return rows


def lenient_column(task: Task, rollout: Rollout) -> dict[str, bool | None]:
    if not isinstance(task, PromptTask):
        return {}
    return {"lenient": task.lenient(rollout.prompt, rollout.text, rollout.finished)}


def sample_key(mode: str, prompt: Prompt, sample: int) -> dict[str, Any]:
    """The columns that identify a row of samples.parquet."""
    return {"mode": mode, "question": prompt.id, "sample": sample, "gold": prompt.answer}


def scores_of(rows: list[dict[str, Any]], mode: str, samples: int, k: int) -> list[Score]:
    """The scores of `rows`, `samples` adjacent rows for each question; maj@n and pass@k only if mode is sampled."""
    scores = [accuracy_score(f"eval/accuracy_{mode}", rows, samples)]
    if has_lenient(rows):
        estimate = over_samples(by_question(rows, "lenient", samples))
        scores.append(Score.from_estimate(f"eval/lenient_{mode}", estimate))
    if mode == "sampled":
        correct, answers = by_question(rows, "correct", samples), by_question(rows, "answer", samples)
        scores += [
            Score.from_estimate("eval/majority", majority(answers, correct)),
            Score.from_estimate("eval/pass_at_k", pass_at_k(correct, k)),
        ]
    return scores


def accuracy_score(metric: str, rows: list[dict[str, Any]], samples: int) -> Score:
    """Mean over questions of the mean over samples, with the shares of completions cut or without an answer."""
    return Score.from_estimate(
        metric,
        over_samples(by_question(rows, "correct", samples)),
        truncated=mean([float(not row["finished"]) for row in rows]),
        format_failed=mean([float(row["answer"] is None) for row in rows]),
    )


def has_lenient(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all rows say what the last number is worth; those of runs from before that do not."""
    return all(row.get("lenient") in (True, False) for row in rows)


def by_question(rows: list[dict[str, Any]], column: str, samples: int) -> list[list[Any]]:
    """(questions, samples) of one column."""
    values = [row[column] for row in rows]
    return [values[i : i + samples] for i in range(0, len(values), samples)]
