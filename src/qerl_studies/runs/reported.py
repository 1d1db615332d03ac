"""A reported study: runs that others made, as one table of twelve columns. The one place that knows its columns.

    reported.csv     a row for each number: COLUMNS
    reported.json    who made the runs, each arm's options, and what of them is not judged, with the reason

`qerl-bench import` writes it, and `reported_runs.py` makes runs of it for every reader. A row is about one run, which
is an arm and a seed; a row with a question is the share of right answers to it. Other programs may write the table too
(docs/how-to/import.md). Nothing in these files is looked up or executed, and names become part of no path.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from qerl_core.checks import ConfigError, require
from qerl_core.metrics.definitions import definitions
from qerl_core.process.arguments import printable
from qerl_core.rundir.read_files import read_object
from qerl_studies.runs.environments import CLASS

REPORTED, ABOUT = "reported.csv", "reported.json"
MAX_BYTES = 2**28  # of a table, and of each file that is imported
MAX_ROWS = 5_000_000
MAX_TEXT = 400  # characters of a cell
MAX_STEP = 2**31
NEAR = 0.005  # of a share that was written with two digits
LARGEST = 1e100  # of a value: FP32 ends at 3e38, and squares of this can be added
ANSWERS = {"eval/accuracy_greedy": "greedy", "eval/accuracy_sampled": "sampled"}  # metrics that rows by question have
REMEDY = "Import it again: qerl-bench import csv FILE out=STUDY"


@dataclass(frozen=True)
class Row:
    """One number. Empty: seed if unknown, question of a number of the whole run, n if unknown."""

    study: str
    arm: str
    seed: int | None
    model: str
    task: str
    step: int  # 0 is before training
    metric: str  # of qerl_core/metrics/definitions.py if the definition is the same, else TOOL/NAME
    question: str  # any name that all arms give to it
    value: float  # NaN where the others logged no number
    n: int | None  # what the value is a mean of: completions, or samples of a question
    definition: str
    source: str  # the file it was read from, by its name


COLUMNS = tuple(field.name for field in fields(Row))


@dataclass(frozen=True)
class About:
    """`arms` have the options of each as far as known; `unjudged` has runs or metrics with the reason; `notes` is what
    else a reader has to know."""

    tool: str
    arms: Mapping[str, Mapping[str, Any]]
    unjudged: Mapping[str, str]
    notes: Sequence[str] = ()


def is_reported(folder: Path) -> bool:
    """Whether `folder` holds a reported study."""
    return (folder / REPORTED).is_file() and (folder / ABOUT).is_file()


def write(folder: Path, rows: Iterable[Row], about: About) -> None:
    """Write the two files. Raises ConfigError as `checked` does, and before anything is written for too many rows."""
    lines = [*rows]
    require(bool(lines), f"nothing to write to {folder}: no number was found")
    require(len(lines) <= MAX_ROWS, f"{len(lines):,} numbers, more than the {MAX_ROWS:,} that a study may have")
    for line in lines:
        checked(line, f"{REPORTED}, of {printable(line.source)[:MAX_TEXT] or 'no source'}")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / REPORTED).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([_cell(value) for value in astuple(line)] for line in lines)
    content = {
        "class": CLASS,
        "tool": about.tool,
        "arms": {arm: dict(options) for arm, options in about.arms.items()},
        "unjudged": dict(about.unjudged),
        "notes": [*about.notes],
    }
    (folder / ABOUT).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return repr(value) if isinstance(value, float) else str(value)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a table with COLUMNS. Raises ConfigError that names the line, for whatever is none."""
    require(path.is_file(), f"{path} is not there: give a CSV file with the columns {', '.join(COLUMNS)}")
    check_size(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file, strict=True)
            heads = next(lines, [])
            missing = [name for name in COLUMNS if name not in heads]
            require(not missing, f"{path} has no column {', '.join(missing)}: its first line must name all twelve")
            places = [heads.index(name) for name in COLUMNS]
            for number, cells in enumerate(islice(lines, MAX_ROWS + 1), start=2):
                where = f"{path}, line {lines.line_num}"
                require(number <= MAX_ROWS + 1, f"{where}: more than {MAX_ROWS:,} rows; leave metrics out")
                require(len(cells) == len(heads), f"{where} has {len(cells)} cells, its heading {len(heads)}")
                yield row_of(dict(zip(COLUMNS, (cells[place] for place in places), strict=True)), where)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no CSV file in UTF-8 ({error})") from error


def row_of(cells: Mapping[str, str], where: str) -> Row:
    """A row from texts. Raises ConfigError, with `where`, for a number that is none."""
    return checked(
        Row(
            **{key: cells[key] for key in COLUMNS if key not in ("seed", "step", "value", "n")},
            seed=_whole("seed", cells["seed"], where) if cells["seed"] else None,
            step=_whole("step", cells["step"], where),
            value=_number(cells["value"], where),
            n=_whole("n", cells["n"], where) if cells["n"] else None,
        ),
        where,
    )


def checked(row: Row, where: str) -> Row:
    """The row itself. Raises ConfigError for a text that is missing, too long, or has control characters."""
    for key in ("study", "arm", "model", "task", "metric", "definition"):
        require(bool(getattr(row, key).strip()), f"{where}: {key} is empty")
    for key, value in zip(COLUMNS, astuple(row), strict=True):
        if isinstance(value, str):
            require(len(value) <= MAX_TEXT, f"{where}: {key} has {len(value)} characters, at most {MAX_TEXT} are read")
            shown = printable(value)
            require(shown == value and "\n" not in value, f"{where}: {key} has control characters: {shown[:80]!r}")
    require(0 <= row.step < MAX_STEP, f"{where}: step must be from 0 to {MAX_STEP - 1}, got {row.step}")
    require(row.seed is None or 0 <= row.seed < 2**63, f"{where}: seed must be from 0 to 2^63 - 1, got {row.seed}")
    known = math.isnan(row.value) or abs(row.value) <= LARGEST
    require(known, f"{where}: value must be empty or at most {LARGEST:g} in size, got {row.value:g}")
    require(row.n is None or 0 < row.n < MAX_STEP, f"{where}: n must be a count above 0, got {row.n}")
    fits = row.metric not in _shares() or math.isnan(row.value) or abs(row.value) <= 1 + NEAR
    require(fits, f"{where}: {row.metric} is a share, from 0 to 1, got {row.value:g}: write 45 % as 0.45")
    share = not row.question or (row.metric in ANSWERS and row.n is not None and _is_part(row.value, row.n))
    require(
        share,
        f"{where}: a row with a question is the share of its n answers that are right, such as 0.5 of 2, of the metric "
        f"{' or '.join(ANSWERS)}; got {row.metric} {row.value:g}, n {row.n}",
    )
    return row


@cache
def _shares() -> set[str]:
    return {name for name, text in definitions().items() if text.startswith("share:")}


def _is_part(value: float, n: int) -> bool:
    """Whether `value` is k / n, as far as two digits tell."""
    return 0 <= value <= 1 and abs(round(value * n) / n - value) <= NEAR


def _whole(key: str, text: str, where: str) -> int:
    require(bool(re.fullmatch(r"[+-]?\d{1,19}", text)), f"{where}: {key} must be a whole number, got {text[:40]!r}")
    return int(text)


def _number(text: str, where: str) -> float:
    try:
        return float(text.replace("_", "?")) if text else math.nan  # Python reads 4_5 as 45
    except ValueError:
        raise ConfigError(f"{where}: value must be a number or empty, got {text[:40]!r}") from None


def check_size(path: Path) -> None:
    size = path.stat().st_size
    require(
        size <= MAX_BYTES,
        f"{path} has {size / 2**20:,.0f} MiB, more than the {MAX_BYTES // 2**20} that are read: leave metrics out",
    )


def read_about(folder: Path) -> About:
    """Raises ConfigError for a file that is none."""
    content = read_object(folder / ABOUT, REMEDY)
    where = folder / ABOUT
    require(content.get("class") == CLASS, f"{where} is of no study of class {CLASS}. {REMEDY}")
    arms, unjudged, notes = (content.get(key) for key in ("arms", "unjudged", "notes"))
    texts = isinstance(unjudged, dict) and isinstance(notes, list) and isinstance(content.get("tool"), str)
    texts = texts and all(isinstance(one, str) for one in [*(unjudged or {}).values(), *(notes or [])])
    objects = isinstance(arms, dict) and all(isinstance(one, dict) for one in arms.values())
    require(texts and objects, f"{where} must have tool, arms, unjudged and notes. {REMEDY}")
    assert isinstance(arms, dict) and isinstance(unjudged, dict) and isinstance(notes, list)
    return About(*(_printable(part) for part in (content["tool"], arms, unjudged, notes)))


def _printable(value: Any) -> Any:
    """A tree whose texts a terminal can show."""
    if isinstance(value, dict):
        return {_printable(str(key)): _printable(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_printable(part) for part in value]
    return printable(value).replace("\n", " ") if isinstance(value, str) else value
