"""Where the questions of one split come from: a data set of the Hugging Face hub, or a local JSONL file in its place.

Every faulty row is found before anything runs, and reported by kind, with counts and examples. A row is text in, text
out; what an answer means is the judge's business.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from qerl_bench.checks import ConfigError, require
from qerl_bench.task.datafile import read_rows

SHOWN = 3  # examples per kind of fault


@dataclass(frozen=True, kw_only=True)
class Row:
    """One problem."""

    line: int  # from 1, within its split
    question: str
    answer: str  # the column as it stands
    reasoning: str  # the worked solution in it; empty if there is none
    gold: str  # the final answer


@dataclass(frozen=True, kw_only=True)
class Source:
    """One split. `question`, `answer` and `id` list names of columns; the first that the data has is read. It need not
    have one for ids; those that it has must tell its rows apart.

    `marker`: the answer column holds a worked solution, and the gold answer stands behind this marker.
    `instruction_line`: a last line of the questions that is cut off, since the prompt brings its own instruction.
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
                f"a task's {key} must list the names of columns, got {names!r}",
            )
        limit = self.max_question_characters
        require(
            limit is None or (type(limit) is int and limit >= 1),
            f"a task's max_question_characters must be null or a whole number of at least 1, got {limit!r}",
        )

    def rows(self, file: str | None, remedy: str, readable: Callable[[str], bool]) -> tuple[Row, ...]:
        """The split from `file`, or from the hub if it is None, without questions that are too long.

        `readable` says whether an answer could ever equal a gold answer. Raises ConfigError for faulty rows, and for data
        that cannot be had, with `remedy` as the way out.
        """
        where = str(file) if file is not None else f"{self.dataset_id}, split {self.split}"
        if file is not None:
            raw = _file_rows(str(Path(file).resolve()))
        else:
            raw = _hub_rows(self.dataset_id, self.config, self.revision, self.split, remedy)
        known = {column for row in raw for column in row}
        every = f"{where}: none of {len(raw)} rows"
        question, answer = (_column(names, known, every) for names in (self.question, self.answer))
        id = next((name for name in self.id if name in known), None)
        lines: dict[str, int] = {}
        found: list[Row] = []
        faults: dict[str, list[str]] = defaultdict(list)
        for line, row in enumerate(raw, start=1):
            try:
                if id is not None:
                    _check_id(_text(row, id), line, lines)
                found.append(self._row(line, _text(row, question), _text(row, answer), readable))
            except _Fault as fault:
                faults[fault.kind].append(f"line {line}{fault.detail}")
        if faults:
            kinds = [
                f"{len(cases)} with {kind} ({'; '.join(cases[:SHOWN])}{'; ...' if len(cases) > SHOWN else ''})"
                for kind, cases in faults.items()
            ]
            raise ConfigError(f"{where}: {len(raw)} rows, of them {', '.join(kinds)}; repair or remove these rows")
        limit = self.max_question_characters
        short = tuple(row for row in found if limit is None or len(row.question) <= limit)
        require(bool(short), f"{where}: all {len(found)} questions have more than {limit} characters; raise the limit")
        return short

    def _row(self, line: int, question: str, answer: str, readable: Callable[[str], bool]) -> Row:
        question = question.strip()
        if self.instruction_line is not None:
            question = question.removesuffix(self.instruction_line).rstrip()
        if not question:
            raise _Fault("an empty question", "")
        reasoning, gold = "", answer
        if self.marker is not None:
            reasoning, marker, gold = answer.partition(self.marker)
            if not marker:
                raise _Fault(f"no {self.marker} before the final answer", f": ...{answer[-40:]!r}")
        if not gold.strip():
            raise _Fault("an empty answer", "")
        if not readable(gold.strip()):
            raise _Fault("an answer that nothing can equal", f": {gold.strip()[:40]!r}")
        return Row(line=line, question=question, answer=answer, reasoning=reasoning.strip(), gold=gold.strip())


class _Fault(Exception):
    """One row cannot be used; `kind` groups such rows, `detail` is what to show of this one."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


def _text(row: dict[str, Any], column: str) -> str:
    """The text in a column; whole numbers are taken as text too, since answers and ids are often stored so."""
    value = row.get(column)
    if value is None:
        raise _Fault(f"no {column!r}", f" has {', '.join(map(repr, row)) or 'nothing'}")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _Fault(f"a {column!r} that is not text", f": {type(value).__name__}")
    return str(value)


def _check_id(id: str, line: int, lines: dict[str, int]) -> None:
    if lines.setdefault(id, line) != line:
        raise _Fault("the id of another row", f" and line {lines[id]}: {id[:40]!r}")


def _column(names: list[str], known: set[str], every: str) -> str:
    """The first of `names` that is known."""
    column = next((name for name in names if name in known), None)
    if column is None:
        raise ConfigError(
            f"{every} has a column {' or '.join(map(repr, names))}; the columns are "
            f"{', '.join(map(repr, sorted(known)))}; name the right one in the task's question or answer list"
        )
    return column


@lru_cache(maxsize=8)
def _file_rows(path: str) -> tuple[dict[str, Any], ...]:
    return tuple(read_rows(path))


@lru_cache(maxsize=8)
def _hub_rows(
    dataset_id: str, config: str | None, revision: str | None, split: str, remedy: str
) -> tuple[dict[str, Any], ...]:
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
    rows = tuple(dict(row) for row in raw)
    require(bool(rows), f"the {split} split of {dataset_id} is empty; {remedy}")
    return rows


def normalised(text: str, instructions: Iterable[str] = ()) -> str:
    """`text` reduced to its letters and digits, so that case, spacing, punctuation and markup make no difference.

    `instructions` that it ends with are no part of the question and are cut off.
    """
    words = " ".join(re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).casefold()))
    for line in instructions:
        words = words.removesuffix(f" {normalised(line)}")
    return words


def shared(train: tuple[Row, ...], held_out: tuple[Row, ...], same: Callable[[str], str]) -> list[tuple[Row, Row]]:
    """The training rows whose question is also held out, each with its held-out twin; `same` maps equal questions to
    one text."""
    questions = {same(row.question): row for row in held_out}
    pairs = [(row, questions.get(same(row.question))) for row in train]
    return [(row, twin) for row, twin in pairs if twin is not None]
