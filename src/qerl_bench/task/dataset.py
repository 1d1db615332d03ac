"""Tasks that read a data set: gsm8k, bigmath, dapo_math, math500, aime24, aime25 and amc23 differ only in their YAML.

Training uses the train split, evaluation the held-out split, and `check` looks for questions that are in both. A data
set without a train split is for evaluation only and names the tasks to train on. The instruction asks for the format
that the reward reads, and answers are compared by value: the released QeRL code does neither on GSM8K.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from qerl_bench.task.datafile import training_indices
from qerl_bench.task.grader.extract import well_formed
from qerl_bench.task.grader.grader import Grader
from qerl_bench.task.prompt_task import PromptTask, no_demonstrations
from qerl_bench.task.prompts import format_demonstration
from qerl_bench.task.question_form import normalize_question
from qerl_bench.task.sources import MAX_EXAMPLES, QuestionRow, QuestionSource, Refused
from qerl_core.checks import ConfigError, check_fields, one_of, optional, require, text
from qerl_core.records import Demonstration, Prompt

log = logging.getLogger(__name__)
LEAKS = ("refuse", "drop")
_ANNOTATION = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator calls, such as <<48/2=24>>; nothing here runs them


class Leaked(ConfigError):
    """Training questions are held out too."""

    words = ("task.leaks=drop",)


class TooFew(ConfigError):
    """Fewer questions are held out than are to be asked."""

    words = ("eval.questions=null",)


class DataRefused(ConfigError):
    """All that is wrong with a data set, a line each, and the `words` that mend it; `mended` has its held-out questions
    as they then are. None: words do not suffice."""

    def __init__(self, said: Sequence[str], words: Sequence[str], mended: DatasetTask | None) -> None:
        self.said, self.words, self.mended = [*said], [*words], mended
        numbered = [f"({number}) {one}" for number, one in enumerate(said, start=1)]
        several = [f"{len(said)} things are wrong.", *numbered, f"In one: {' '.join(words)}"]
        super().__init__("\n".join(several) if len(said) > 1 else said[0])


@dataclass(frozen=True, kw_only=True)
class DatasetTask(PromptTask):
    """Questions with gold answers. An evaluation-only set has `train` None; `train_on` names tasks to train on."""

    equality: str
    train: QuestionSource | None
    eval: QuestionSource
    train_file: str | None
    eval_file: str | None
    train_on: str | None
    leaks: str

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "task", leaks=one_of(*LEAKS), train_file=optional(text), eval_file=optional(text))
        require(
            (self.train is None) == (self.train_on is not None) and (self.train_file is None or self.train is not None),
            self._evaluation_only if self.train is None else "task.train_on is for sets that have no task.train",
        )

    @property
    def grader(self) -> Grader:
        return self.grader_of(self.equality)

    def normalize(self, question: str) -> str:
        """The question without layout and sentence punctuation, and without the instruction line of either split."""
        sources = (self.eval,) if self.train is None else (self.eval, self.train)
        return normalize_question(question, {line for source in sources if (line := source.instruction_line)})

    def check(self) -> None:
        """Load both splits. Raises ConfigError for bad rows, leaked questions, or an empty training split.

        What words would mend is taken as mended, to find what else is wrong: all is said at once.
        """
        self.grader.check()
        task: DatasetTask | None = self
        said, words = [], []
        while task is not None:
            try:
                task.rows("train")
                task.rows("test")
                break
            except ConfigError as error:
                said.append(str(error))
                words += getattr(error, "words", [])
                if isinstance(error, Leaked):  # the last thing that can be wrong
                    break
                task = task._mended(error)
        if said:
            raise DataRefused(said, words, task)

    def _mended(self, error: ConfigError) -> DatasetTask | None:
        """This task with what the words of `error` say; None if it has none."""
        if not isinstance(error, Refused) or error.mended is None:
            return None
        return replace(self, **{error.words[0].lstrip("'").split(".")[1]: error.mended})

    def train_prompts(self, step: int, count: int, seed: int) -> list[Prompt]:
        return [self._prompt("train", row) for row in self._training_batch(step, count, seed)]

    def stored_prompts(self) -> list[Prompt]:
        return [self._prompt("train", row) for row in self._train_rows]

    def eval_prompts(self, count: int | None) -> list[Prompt]:
        rows = self._eval_rows
        if count is not None and not 1 <= count <= len(rows):
            raise TooFew(
                f"task={self.name} has {len(rows)} test questions, got count={count}; set eval.questions (of "
                f"a probe: questions) to 1 to {len(rows)}, or null = all"
            )
        return [self._prompt("test", row) for row in rows[:count]]

    def demonstrations(self, step: int, count: int, seed: int) -> list[Demonstration]:
        demonstrations = [
            Demonstration(prompt=self._prompt("train", row), completion=self._solution(row))
            for row in self._training_batch(step, count, seed)
        ]
        for demonstration in demonstrations:
            require(
                well_formed(demonstration.completion, self.answer_format),
                f"{demonstration.prompt.id}: the solution contains markers of task.answer_format={self.answer_format}; "
                "remove them or choose another format",
            )
        return demonstrations

    def calibration_demonstrations(self, count: int, seed: int) -> list[Demonstration]:
        """Those of the first step of a run with this seed; steps count from 1."""
        instead = "quantizer.calibration.file=TEXT"
        require(
            self.train is not None,
            f"task={self.name} is for evaluation only and has no training questions to calibrate a quantizer on; give "
            f"a text, {instead}",
        )
        rows = len(self._train_rows)
        require(
            count <= rows,
            f"quantizer.calibration.samples={count} is more than the {rows} training questions of task={self.name}; "
            f"use at most {rows}, or a text, {instead}",
        )
        return self.demonstrations(1, count, seed)

    def rows(self, split: str) -> tuple[QuestionRow, ...]:
        """The rows of the `train` or `test` split, read once."""
        return self._train_rows if split == "train" else self._eval_rows

    def without(self, forms: Container[str]) -> DatasetTask:
        """The same task without the held-out questions whose normal form is in `forms`; it may have none left."""
        rest = replace(self)
        rest.__dict__["_eval_rows"] = tuple(row for row in self._eval_rows if self.normalize(row.question) not in forms)
        return rest

    def _solution(self, row: QuestionRow) -> str:
        if self.train is None or self.train.marker is None:
            raise no_demonstrations(self.name)
        return format_demonstration(self.answer_format, _ANNOTATION.sub("", row.reasoning), row.gold)

    def copies(self) -> dict[str, str]:
        """The ids of held-out questions that are not asked, because they are copies, with the ids of those that are."""
        kept = {self.normalize(row.question): row for row in self._eval_rows}
        ids = {row.line: kept[form].line for row in self._read_rows if (form := self.normalize(row.question)) in kept}
        return {self._id("test", line): self._id("test", first) for line, first in ids.items() if line != first}

    @cached_property
    def _read_rows(self) -> tuple[QuestionRow, ...]:
        self.grader.check()  # callers that only evaluate do not call `check`
        return self.eval.rows("task.eval", self.eval_file, "set task.eval_file to a local JSONL file", self.grader)

    @cached_property
    def _eval_rows(self) -> tuple[QuestionRow, ...]:
        """Each held-out question once: a copy says nothing new, but would make an error over questions smaller."""
        first: dict[str, QuestionRow] = {}
        copies = []
        for row in self._read_rows:
            kept = first.setdefault(self.normalize(row.question), row)
            if kept is not row:
                copies.append(f"{row.place} = {kept.place}")
                require(
                    self.grader.equal(kept.gold, row.gold),
                    f"task={self.name}: {kept.place} and {row.place} of {self.eval_file or 'the test part'} are "
                    "one question with two answers, "
                    f"{kept.gold[:40]!r} and {row.gold[:40]!r}; keep the right one",
                )
        if copies:
            examples = "; ".join(copies[:MAX_EXAMPLES])
            log.warning(
                "%d of %d test questions of task=%s stand there before and count once (%s)",
                len(copies),
                len(self._read_rows),
                self.name,
                examples,
            )
        return tuple(first.values())

    @cached_property
    def _train_rows(self) -> tuple[QuestionRow, ...]:
        if self.train is None:
            raise ConfigError(self._evaluation_only)
        grader = None if self.equality == "math" else self.grader  # checking LaTeX is slow; bad gold earns nothing
        rows = self.train.rows("task.train", self.train_file, "set task.train_file to a local JSONL file", grader)
        held_out = {self.normalize(row.question): row for row in self._eval_rows}
        forms = {question: self.normalize(question) for question in {row.question for row in rows}}  # many stand often
        leaked = [(row, twin) for row in rows if (twin := held_out.get(forms[row.question]))]
        if not leaked:
            return rows
        examples = "; ".join(
            f"train {row.place} = test {twin.place}: {row.question[:60]!r}" for row, twin in leaked[:MAX_EXAMPLES]
        )
        summary = f"{len(leaked)} of {len(rows)} training questions of task={self.name} are also in its test split"
        require(
            len(leaked) < len(rows), f"{summary} ({examples}): no training question is left; use another train_file"
        )
        if self.leaks != "drop":
            raise Leaked(
                f"{summary}; none may be ({examples}). Remove them from one of the two, or drop them from training "
                "with task.leaks=drop"
            )
        log.warning("%s and were dropped from training (%s)", summary, examples)
        dropped = {row.line for row, _ in leaked}
        return tuple(row for row in rows if row.line not in dropped)

    @property
    def _evaluation_only(self) -> str:
        return (
            f"task={self.name} is for evaluation only and has no training questions; train on {self.train_on}, then "
            f"evaluate the finished run on task={self.name}"
        )

    def _training_batch(self, step: int, count: int, seed: int) -> list[QuestionRow]:
        rows = self._train_rows
        return [rows[index] for index in training_indices(step, count, seed, len(rows))]

    def _prompt(self, split: str, row: QuestionRow) -> Prompt:
        return self.prompt_template.prompt(self._id(split, row.line), row.question, row.gold)

    def _id(self, split: str, line: int) -> str:
        return f"{self.name}/{split}/{line}"
