"""Every task that is a data set: gsm8k, bigmath, dapo_math, math500, aime24, aime25, amc23 differ in their YAML alone.

Training draws from the train split, evaluation from the held-out one, and `check` looks for questions that stand in
both. A set without a train split serves evaluation only and says what to train on. The instruction asks for the format
that the reward pays for, and answers are compared by value: the released QeRL code does neither on GSM8K.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import cached_property

from qerl_bench.checks import ConfigError, require
from qerl_bench.records import Demonstration, Prompt
from qerl_bench.task.datafile import training_rows
from qerl_bench.task.grader.extract import well_formed
from qerl_bench.task.grader.grader import Judge
from qerl_bench.task.prompt_task import PromptedTask, nothing_to_imitate
from qerl_bench.task.prompts import worked
from qerl_bench.task.sources import SHOWN, Row, Source, normalised, shared

log = logging.getLogger(__name__)
LEAKS = ("refuse", "drop")
_ANNOTATION = re.compile(r"<<[^<>]*>>")  # GSM8K's calls of a calculator, such as <<48/2=24>>, which nothing here runs


@dataclass(frozen=True, kw_only=True)
class Questions(PromptedTask):
    """Questions with gold answers. `train` is None for a set that only evaluates; `train_on` then names others."""

    equality: str
    train: Source | None
    eval: Source
    train_file: str | None
    eval_file: str | None
    train_on: str | None
    leaks: str

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.leaks in LEAKS, f"task.leaks must be one of {', '.join(LEAKS)}, got {self.leaks!r}")
        require(
            (self.train is None) == (self.train_on is not None) and (self.train_file is None or self.train is not None),
            self._evaluation_only if self.train is None else "task.train_on is for sets that have no task.train",
        )

    @property
    def judge(self) -> Judge:
        return Judge.of(self, self.equality)

    def normalised(self, question: str) -> str:
        """Without the instruction lines of either split, whichever the question comes from."""
        sources = (self.eval,) if self.train is None else (self.eval, self.train)
        return normalised(question, {line for source in sources if (line := source.instruction_line)})

    def check(self) -> None:
        """Load both splits. Raises ConfigError for faulty rows, a leak, or if there is nothing to train on."""
        self.judge.check()
        self.rows("train")
        self.rows("test")

    def train_prompts(self, step: int, count: int, seed: int) -> list[Prompt]:
        return [self._prompt("train", row) for row in self._drawn(step, count, seed)]

    def stored_prompts(self) -> list[Prompt]:
        return [self._prompt("train", row) for row in self._train_rows]

    def eval_prompts(self, count: int | None) -> list[Prompt]:
        rows = self._eval_rows
        require(
            count is None or 1 <= count <= len(rows),
            f"task={self.name} has {len(rows)} test questions, got count={count}; set eval.questions to 1 to "
            f"{len(rows)}, or null = all",
        )
        return [self._prompt("test", row) for row in rows[:count]]

    def demonstrations(self, step: int, count: int, seed: int) -> list[Demonstration]:
        shown = [
            Demonstration(prompt=self._prompt("train", row), completion=self._solution(row))
            for row in self._drawn(step, count, seed)
        ]
        for demonstration in shown:
            require(
                well_formed(demonstration.completion, self.answer_format),
                f"{demonstration.prompt.id}: the solution holds marks of task.answer_format={self.answer_format}, so "
                "it cannot serve as a demonstration; remove them or choose another format",
            )
        return shown

    def rows(self, split: str) -> tuple[Row, ...]:
        """The rows of `train` or `test`, read once."""
        return self._train_rows if split == "train" else self._eval_rows

    def _solution(self, row: Row) -> str:
        if self.train is None or self.train.marker is None:
            raise nothing_to_imitate(self.name)
        return worked(self.answer_format, _ANNOTATION.sub("", row.reasoning), row.gold)

    @cached_property
    def _eval_rows(self) -> tuple[Row, ...]:
        self.judge.check()  # some callers evaluate only, and never come to `check`
        return self.eval.rows(self.eval_file, "set task.eval_file to a local JSONL file", self.judge.readable)

    @cached_property
    def _train_rows(self) -> tuple[Row, ...]:
        if self.train is None:
            raise ConfigError(self._evaluation_only)
        readable = self.judge.readable if self.equality == "numeric" else bool  # LaTeX takes long; bad gold never pays
        rows = self.train.rows(self.train_file, "set task.train_file to a local JSONL file", readable)
        leaked = shared(rows, self._eval_rows, self.normalised)
        if not leaked:
            return rows
        examples = "; ".join(
            f"train line {row.line} = test line {twin.line}: {row.question[:60]!r}" for row, twin in leaked[:SHOWN]
        )
        found = f"{len(leaked)} of {len(rows)} training questions of task={self.name} are also in its test split"
        require(
            self.leaks == "drop",
            f"{found}, none may be ({examples}); remove them from one of the two, or leave them out of training with "
            "task.leaks=drop",
        )
        require(len(leaked) < len(rows), f"{found} ({examples}): nothing is left to train on; use another train_file")
        log.warning("%s and left out of training (%s)", found, examples)
        gone = {row.line for row, _ in leaked}
        return tuple(row for row in rows if row.line not in gone)

    @property
    def _evaluation_only(self) -> str:
        return (
            f"task={self.name} is for evaluation only and has no training questions; train on {self.train_on}, then "
            f"evaluate the finished run on task={self.name}"
        )

    def _drawn(self, step: int, count: int, seed: int) -> list[Row]:
        rows = self._train_rows
        return [rows[index] for index in training_rows(step, count, seed, len(rows))]

    def _prompt(self, split: str, row: Row) -> Prompt:
        return self.wording.prompt(f"{self.name}/{split}/{row.line}", row.question, row.gold)
