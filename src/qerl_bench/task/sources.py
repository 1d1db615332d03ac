"""Reads the questions of one split from the Hugging Face hub or from a local file: JSONL, CSV or Parquet.

All bad rows are found before anything runs and reported together: by kind, with counts and examples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from qerl_bench.task.datafile import read_rows
from qerl_bench.task.grader.grader import Grader
from qerl_core.checks import ConfigError, count, optional, require
from qerl_core.file_state import FileState, file_state

MAX_EXAMPLES = 3  # shown for each kind of bad row
USUAL = {  # what others call the columns
    "question": ("question", "problem", "prompt", "query", "instruction", "input", "text"),
    "answer": ("answer", "solution", "target", "response", "output", "completion", "label", "gold"),
}


@dataclass(frozen=True, kw_only=True)
class QuestionRow:
    line: int  # from 1, within its split: the number of the row
    place: str = field(compare=False)  # in its file: line 3, or row 2 of Parquet and the hub
    question: str
    answer: str  # the answer column, unchanged
    reasoning: str  # the worked solution in it; may be empty
    gold: str  # the final answer


@dataclass(frozen=True, kw_only=True)
class QuestionSource:
    """One split. `question`, `answer` and `id` list column names; the first that exists is read. An id column is
    optional; its values must be unique.

    `marker` separates a worked solution from the gold answer after it; null: the answer column is the gold answer.
    `instruction_line` is removed from the end of questions, because the prompt has its own instruction.
    """

    dataset_id: str
    config: str | None
    revision: str | None
    split: str
    question: list[str]
    answer: list[str]
    id: list[str]
    marker: str | None
    instruction_line: str | None
    max_question_characters: int | None

    def __post_init__(self) -> None:
        for key, least in (("question", 1), ("answer", 1), ("id", 0)):
            names = getattr(self, key)
            require(
                isinstance(names, list) and len(names) >= least and all(isinstance(name, str) for name in names),
                f"a task's {key} must list column names, got {names!r}",
            )
        optional(count())("a task's max_question_characters", self.max_question_characters)

    def rows(self, key: str, file: str | None, remedy: str, grader: Grader | None) -> tuple[QuestionRow, ...]:
        """The split from `file`, or from the hub if it is None, without questions that are too long.

        `key` is the config key of this split, for messages. With `grader`, gold answers that it cannot read are bad
        rows. Raises ConfigError for bad rows, and for data that cannot be loaded, with `remedy` as the suggestion.
        """
        where = str(file) if file is not None else f"{self.dataset_id}, split {self.split}"
        if file is not None:
            placed = _file_rows(str(Path(file).resolve()))
        else:
            placed = _hub_rows(self.dataset_id, self.config, self.revision, self.split, remedy)
        raw = [*placed.values()]
        known = {column for row in raw for column in row}
        question, answer = self._columns(raw, key, where)
        id = next((name for name in self.id if name in known), None)
        places: dict[str, str] = {}
        rows: list[QuestionRow] = []
        faults: dict[str, list[str]] = defaultdict(list)
        for line, (place, row) in enumerate(placed.items(), start=1):
            try:
                if id is not None:
                    _check_id(_text(row, id), place, places)
                rows.append(self._row(line, place, _text(row, question), _text(row, answer), grader))
            except _BadRow as fault:
                faults[fault.kind].append(f"{place}{fault.detail}")
        if faults:
            kinds = [
                f"{len(cases)} with {kind} ({'; '.join(cases[:MAX_EXAMPLES] + ['...'] * (len(cases) > MAX_EXAMPLES))})"
                for kind, cases in faults.items()
            ]
            bare = f", or say that the column is the final answer: {key}.marker=null" * (self._without_marker in faults)
            said = f"{where}: {len(raw)} rows, of them {', '.join(kinds)}; fix or remove these rows{bare}"
            if len(faults[self._without_marker]) == len(raw):
                raise Refused(said, [f"{key}.marker=null"], replace(self, marker=None))
            raise ConfigError(said)
        limit = self.max_question_characters
        short = tuple(row for row in rows if limit is None or len(row.question) <= limit)
        require(bool(short), f"{where}: all {len(rows)} questions have more than {limit} characters; raise the limit")
        return short

    def _columns(self, raw: Sequence[Mapping[str, Any]], key: str, where: str) -> tuple[str, str]:
        """The columns of questions and answers. Raises `Refused`, with words to type, if one is not named."""
        known = dict.fromkeys(column for row in raw for column in row)
        wanted = {"question": self.question, "answer": self.answer}
        columns = {part: next((name for name in names if name in known), None) for part, names in wanted.items()}
        missing = [part for part, name in columns.items() if name is None]
        if missing:
            left = [name for name in known if name not in columns.values() and name not in self.id]
            likely = _likely(missing, left, raw)
            asked = " and none a column ".join(" or ".join(map(repr, wanted[part])) for part in missing)
            words = [f"'{key}.{part}=[{likely.get(part, 'NAME')}]'" for part in missing]
            guess = replace(self, **{part: [name] for part, name in likely.items()})
            raise Refused(
                f"{where}: none of {len(raw)} rows has a column {asked}; the columns are "
                f"{', '.join(map(repr, sorted(known)))}. Name the right one: {' '.join(words)}",
                words,
                guess if len(likely) == len(missing) else None,
            )
        return str(columns["question"]), str(columns["answer"])

    @property
    def _without_marker(self) -> str:
        return f"no {self.marker} before the final answer"

    def _row(self, line: int, place: str, question: str, answer: str, grader: Grader | None) -> QuestionRow:
        question = question.strip()
        if self.instruction_line is not None:
            question = question.removesuffix(self.instruction_line).rstrip()
        if not question:
            raise _BadRow("an empty question", "")
        reasoning, gold = "", answer
        if self.marker is not None:
            reasoning, marker, gold = answer.partition(self.marker)
            if not marker:
                raise _BadRow(self._without_marker, f": ...{answer[-40:]!r}")
        if not gold.strip():
            raise _BadRow("an empty answer", "")
        if grader is not None and not grader.is_readable(gold.strip()):
            raise _BadRow("an answer that no completion can equal", f": {gold.strip()[:40]!r}")
        return QuestionRow(
            line=line, place=place, question=question, answer=answer, reasoning=reasoning.strip(), gold=gold.strip()
        )


class Refused(ConfigError):
    """A split that cannot be read as it is described; with the `words` that would describe it, and `mended`, the
    source that they make, with which further faults can be looked for. None: nobody can guess."""

    def __init__(self, said: str, words: Sequence[str], mended: QuestionSource | None) -> None:
        super().__init__(said)
        self.words, self.mended = [*words], mended


class _BadRow(Exception):
    """A row that cannot be used. Messages group bad rows by `kind` and show the `detail` of some."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


def _text(row: dict[str, Any], column: str) -> str:
    """The text in a column. Whole numbers count as text, because answers and ids are often stored as numbers."""
    value = row.get(column)
    if value is None:
        raise _BadRow(f"no {column!r}", f" has {', '.join(map(repr, row)) or 'nothing'}")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _BadRow(f"a {column!r} that is not text", f": {type(value).__name__}")
    return str(value)


def _check_id(id: str, place: str, places: dict[str, str]) -> None:
    if places.setdefault(id, place) != place:
        raise _BadRow("the id of another row", f" and {places[id]}: {id[:40]!r}")


def _likely(missing: Sequence[str], left: Sequence[str], raw: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Of the columns that are `left` those that are probably the `missing` parts: by their usual names, or, where as
    many are left as are missing, a much longer text as the question."""
    found = {part: name for part in missing for name in USUAL[part][::-1] if name in left}
    others = [name for name in left if name not in found.values()]
    length = {name: sum(len(str(row.get(name, ""))) for row in raw) for name in others}
    others = sorted(others, key=lambda name: -length[name])
    unnamed = [part for part in missing if part not in found]
    if len(others) == len(unnamed) and (len(others) < 2 or length[others[0]] > 2 * length[others[1]]):
        found |= dict(zip(unnamed, others, strict=True))
    return found


def _file_rows(path: str) -> dict[str, dict[str, Any]]:
    return _rows_of(path, file_state(Path(path)) if Path(path).is_file() else None)


@lru_cache(maxsize=8)
def _rows_of(path: str, state: FileState | None) -> dict[str, dict[str, Any]]:
    """The rows of a file in a `state`: one that changes while a process lives is read again."""
    return read_rows(path)


@lru_cache(maxsize=8)
def _hub_rows(
    dataset_id: str, config: str | None, revision: str | None, split: str, remedy: str
) -> dict[str, dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError(
            f"{dataset_id} is loaded by the package datasets, which is not installed: pip install datasets, or {remedy}"
        ) from error
    try:
        raw = load_dataset(dataset_id, config, split=split, revision=revision)
    except (OSError, ValueError) as error:  # no network and no cached copy, no such data set, no such config or split
        raise ConfigError(
            f"could not load the {split} split of {dataset_id} (config {config or 'default'}, revision "
            f"{revision or 'newest'}) from the hub: {error}; check the network and the names, or {remedy}"
        ) from error
    rows = {f"row {n}": dict(row) for n, row in enumerate(raw, start=1)}
    require(bool(rows), f"the {split} split of {dataset_id} is empty; {remedy}")
    return rows
