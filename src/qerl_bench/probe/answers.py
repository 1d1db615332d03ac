"""What a policy answers: prompts in one call for each temperature, a row for each answer, and the numbers of them.

An answer has a row with its question, whether it is right by its answer format (`correct`) and by its last number
(`lenient`), its tokens, whether it is finished, and the sum of its tokens' entropies. Entropies and log-probabilities
are over all tokens at the temperature, that of greedy answers at 1, whatever top-p leaves out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from qerl_bench.engine.base import RolloutEngine, Sampling
from qerl_bench.eval.task import grade_rollouts
from qerl_bench.task.base import Task
from qerl_core.process.progress import phase
from qerl_core.records import Prompt, Rollout
from qerl_core.seeding import derive
from qerl_studies.probes.numbers import by_part, counts, enough_tokens

TOP_P = 0.95  # of temperatures below 1, as in conf/eval/paper.yaml; 1 is the distribution that training samples
SCHEMA = pa.schema(
    [
        ("temperature", pa.float64()),
        ("question", pa.string()),
        ("sample", pa.int32()),
        ("correct", pa.bool_()),
        ("lenient", pa.bool_()),
        ("answer", pa.string()),
        ("tokens", pa.int32()),
        ("finished", pa.bool_()),
        ("entropy", pa.float32()),  # nats, the sum over its tokens
        ("completion", pa.string()),  # of the first questions alone
    ]
)


@dataclass(frozen=True, kw_only=True)
class AnswerSet:
    """The answers at one temperature, `samples` to each question one after the other, and how long they took.

    `peak_gib` is of the memory since its last reset, None if it was not read.
    """

    temperature: float
    samples: int
    rollouts: list[Rollout]
    rows: list[dict[str, Any]]
    seconds: float
    peak_gib: float | None = None

    @property
    def tokens(self) -> int:
        return sum(row["tokens"] for row in self.rows)


def sampling(temperature: float, samples: int, max_tokens: int, draw: str) -> Sampling:
    """How to ask at a temperature; `draw` names the random numbers, which no two temperatures share."""
    at = draw if temperature == 1 else f"{draw}/{temperature:g}"
    top_p = TOP_P if 0 < temperature < 1 else 1.0
    each = samples if temperature > 0 else 1
    return Sampling(
        samples=each, temperature=float(temperature), max_tokens=max_tokens, seed=derive("probe", at), top_p=top_p
    )


def sample_answers(
    task: Task, engine: RolloutEngine, prompts: Sequence[Prompt], temperature: float, samples: int, draw: str
) -> AnswerSet:
    """`samples` answers to each prompt, one if greedy, in one call of the engine."""
    how = sampling(temperature, samples, task.max_completion_tokens, draw)
    started = time.monotonic()
    with phase(f"asking {len(prompts)} questions x {how.samples} at temperature {temperature:g}"):
        rollouts = engine.generate([*prompts], how)
    seconds = time.monotonic() - started
    rows = [_row(row, rollout) for row, rollout in zip(grade_rollouts(task, rollouts, ""), rollouts, strict=True)]
    return AnswerSet(temperature=temperature, samples=how.samples, rollouts=rollouts, rows=rows, seconds=seconds)


def _row(graded: Mapping[str, Any], rollout: Rollout) -> dict[str, Any]:
    kept = ("question", "sample", "correct", "lenient", "answer", "tokens", "finished", "completion")
    return {**{key: graded.get(key) for key in kept}, "entropy": sum(rollout.entropies)}


def numbers(asked: AnswerSet) -> dict[str, Any]:
    """What a record keeps of these answers: right ones by question, and means over all of them or over all tokens."""
    rows, samples = asked.rows, asked.samples
    lenient = None if any(row["lenient"] is None for row in rows) else counts(rows, "lenient", samples)
    sums, tokens = by_part([rollout.entropies for rollout in asked.rollouts])
    return {
        "samples": samples,
        "correct": counts(rows, "correct", samples),
        "lenient": lenient,
        "found": float(np.mean([row["answer"] is not None for row in rows])),
        "finished": float(np.mean([row["finished"] for row in rows])),
        "tokens": float(np.mean([row["tokens"] for row in rows])),
        "enough_tokens": enough_tokens(rows),
        "entropy": float(sums.sum() / tokens.sum()),
        "entropy_by_part": [
            float(part / number) if number else None for part, number in zip(sums, tokens, strict=True)
        ],
    }


def table(asked: Sequence[AnswerSet], texts: int) -> pa.Table:
    """The rows of all temperatures, with the completions of the first `texts` questions."""
    rows = []
    for one in asked:
        told = texts * one.samples
        kept = [row if at < told else {**row, "completion": None} for at, row in enumerate(one.rows)]
        rows += [{"temperature": one.temperature, **row} for row in kept]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def first(asked: AnswerSet, questions: int) -> AnswerSet:
    """The answers to the first of the questions."""
    end = questions * asked.samples
    return replace(asked, rollouts=asked.rollouts[:end], rows=asked.rows[:end])
