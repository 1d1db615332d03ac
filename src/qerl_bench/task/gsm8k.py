"""task=gsm8k: grade-school word problems with a whole-number answer (Cobbe et al. 2021, arXiv 2110.14168).

The rows come from two local JSONL files or from the Hugging Face hub. Each has a question and a worked solution whose
last line is the gold answer after `####`. Training draws from the train split, evaluation from the test split, and
`check` refuses to start if a question is in both. The answer is compared as a number and the instruction asks for the
format that the reward pays for: the released QeRL code compares strings, and never tells the model about the tags.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from qerl_bench.errors import BadInput, require
from qerl_bench.records import Demonstration, Prompt, Reward
from qerl_bench.task.answers import parse_number
from qerl_bench.task.base import INSTRUCTION
from qerl_bench.task.datafile import read_rows, training_rows
from qerl_bench.task.extract import MARKER, well_formed
from qerl_bench.task.judge import Judge

_ANNOTATION = re.compile(r"<<[^<>]*>>")  # calculator calls such as <<48/2=24>>, meant for a tool that is not used here


@dataclass(frozen=True, kw_only=True)
class Row:
    """One problem: its question, its gold solution as a completion in the task's format, its gold number as text."""

    line: int  # from 1, within its split
    question: str
    completion: str
    gold: str


@dataclass(frozen=True, kw_only=True)
class Gsm8k:
    """Reward: correct_weight if the one answer block holds the gold number, plus format_weight if well formed."""

    name: str
    dataset_id: str
    dataset_config: str
    revision: str | None
    train_file: str | None
    eval_file: str | None
    max_completion_tokens: int
    answer_format: str
    correct_weight: float
    format_weight: float

    def __post_init__(self) -> None:
        require(
            (self.train_file is None) == (self.eval_file is None),
            f"task=gsm8k needs both task.train_file and task.eval_file, or neither (then {self.dataset_id} is loaded "
            f"from the hub); got train_file={self.train_file}, eval_file={self.eval_file}",
        )
        require(
            isinstance(self.max_completion_tokens, int) and self.max_completion_tokens >= 1,
            f"task.max_completion_tokens must be a whole number from 1, got {self.max_completion_tokens}",
        )
        self.judge.check()

    def check(self) -> None:
        """Load both splits; raise BadInput for malformed rows or if a training question is in the test split too."""
        held_out = {_normalised(row.question): row for row in self._rows("test")}
        leaks = [row for row in self._rows("train") if _normalised(row.question) in held_out]
        if leaks:
            train_row, test_row = leaks[0], held_out[_normalised(leaks[0].question)]
            raise BadInput(
                f"{len(leaks)} training question(s) of task=gsm8k are also in its test split, none may be; "
                f"the first is train line {train_row.line} = test line {test_row.line}: "
                f"{train_row.question[:80]!r}; remove them from one of the two"
            )

    def train_prompts(self, step: int, count: int, seed: int) -> list[Prompt]:
        return [_prompt("train", row) for row in self._training_rows(step, count, seed)]

    def eval_prompts(self, count: int | None) -> list[Prompt]:
        rows = self._rows("test")
        require(
            count is None or 1 <= count <= len(rows),
            f"task=gsm8k has {len(rows)} test questions, got count={count}; ask for 1 to {len(rows)}, or null = all",
        )
        return [_prompt("test", row) for row in rows[:count]]

    def demonstrations(self, step: int, count: int, seed: int) -> list[Demonstration]:
        return [
            Demonstration(prompt=_prompt("train", row), completion=row.completion)
            for row in self._training_rows(step, count, seed)
        ]

    def reward(self, prompt: Prompt, completion: str) -> Reward:
        return self.judge.reward(prompt.answer, completion)

    @property
    def judge(self) -> Judge:
        return Judge.of(self, "numeric")

    def _rows(self, split: str) -> tuple[Row, ...]:
        path = self.train_file if split == "train" else self.eval_file
        if path is None:
            return _hub_rows(self.dataset_id, self.dataset_config, self.revision, split)
        return _file_rows(str(Path(path).resolve()))

    def _training_rows(self, step: int, count: int, seed: int) -> list[Row]:
        rows = self._rows("train")
        return [rows[index] for index in training_rows(step, count, seed, len(rows))]


@lru_cache(maxsize=8)
def _file_rows(path: str) -> tuple[Row, ...]:
    raw = read_rows(path, ("question", "answer"))
    return tuple(_row(row["question"], row["answer"], line, path) for line, row in enumerate(raw, start=1))


@lru_cache(maxsize=8)
def _hub_rows(dataset_id: str, config: str, revision: str | None, split: str) -> tuple[Row, ...]:
    remedy = "or set task.train_file and task.eval_file to local JSONL files with question and answer"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise BadInput(
            f"task=gsm8k loads {dataset_id} with the package datasets, which is not installed: pip install datasets, "
            f"{remedy}"
        ) from error
    try:
        raw = load_dataset(dataset_id, config, split=split, revision=revision)
    except (OSError, ValueError) as error:  # no network and no cached copy, no such data set, no such config or split
        raise BadInput(
            f"task=gsm8k could not load the {split} split of {dataset_id} ({config}, revision {revision or 'newest'}) "
            f"from the hub: {error}; check the network and the names, {remedy}"
        ) from error
    where = f"{dataset_id}, split {split}"
    columns = set(raw.column_names or ())
    require(columns >= {"question", "answer"}, f"{where} needs the columns question and answer, has {sorted(columns)}")
    pairs = list(zip(raw["question"], raw["answer"], strict=True))
    require(
        all(isinstance(text, str) for pair in pairs for text in pair),
        f"{where} holds questions or answers that are not text; task=gsm8k needs strings in both columns",
    )
    return tuple(_row(question, answer, line, where) for line, (question, answer) in enumerate(pairs, start=1))


def _row(question: str, answer: str, line: int, source: str) -> Row:
    """One row, validated: BadInput for an empty question or a gold answer that cannot be read."""
    where = f"{source}, line {line}"
    require(bool(question.strip()), f"{where}: the question is empty; remove the line or fill it in")
    solution, marker, gold = answer.partition(MARKER)
    gold = gold.strip()
    require(bool(marker), f"{where}: the answer lacks {MARKER} and the final number after it, got {answer[-60:]!r}")
    require(
        parse_number(gold) is not None,
        f"{where}: the text after {MARKER} must be one number such as 18, -3, 1,000 or 2.5, got {gold[:60]!r}",
    )
    completion = f"<think>{_ANNOTATION.sub('', solution).strip()}</think><answer>{gold}</answer>"
    require(
        well_formed(completion, "tags"),
        f"{where}: the solution holds think or answer tags, so it cannot serve as a demonstration; remove them",
    )
    return Row(line=line, question=question.strip(), completion=completion, gold=gold)


def _prompt(split: str, row: Row) -> Prompt:
    messages = ({"role": "system", "content": INSTRUCTION}, {"role": "user", "content": row.question})
    return Prompt(id=f"gsm8k/{split}/{row.line}", messages=messages, answer=row.gold)


def _normalised(question: str) -> str:
    return " ".join(question.casefold().split())
