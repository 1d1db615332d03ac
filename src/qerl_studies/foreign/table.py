"""CSV files of others: the long table of a reported study itself, or one line a run with a column for each number."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from qerl_core.checks import ConfigError, require
from qerl_core.metrics.definitions import definitions
from qerl_studies.runs.reported import COLUMNS, REPORTED, About, Row, check_size, read_rows, row_of

DEFINED = {
    "eval/accuracy_greedy": "share of right greedy answers",
    "eval/accuracy_sampled": "share of right sampled ones",
}


def files_of(place: Path) -> list[Path]:
    """The CSV files of a folder, or the one that is named."""
    found = sorted(place.glob("*.csv")) if place.is_dir() else [place]
    require(bool(found), f"{place} has no CSV file: give one, or a folder that holds some")
    return found


def is_long(file: Path) -> bool:
    """Whether the first line names all of COLUMNS."""
    return {*COLUMNS} <= {*_heads(file)}


def _heads(file: Path) -> list[str]:
    require(file.is_file(), f"{file} is not there: give a CSV file, or a folder that holds some")
    check_size(file)
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            return next(csv.reader(lines, strict=True), [])
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no CSV file in UTF-8 ({error})") from error


def read_long(files: Sequence[Path], tool: str) -> tuple[list[Row], About]:
    """The rows as they are. What arms differ in is not in such a table."""
    rows = [row for file in files for row in read_rows(file)]
    notes = [f"options of arms are not in {REPORTED}: in what they differ is what their names say"]
    return rows, About(tool, {row.arm: {} for row in rows}, {}, notes)


def read_wide(
    file: Path, tool: str, given: Mapping[str, str], metrics: Sequence[str], step: int
) -> tuple[list[Row], About]:
    """A row for each number of a file with one line a run.

    `given` has study, model, task, and the columns `arm` and `seed`; `metrics` are COLUMN:NAME or
    COLUMN:NAME:DEFINITION. Raises ConfigError for a column that is not there, and for a number that is none.
    """
    heads = _heads(file)
    parts = [_parts(one) for one in metrics]
    needed = [given["arm"], given["seed"], *(column for column, _, _ in parts)]
    missing = [column for column in dict.fromkeys(needed) if column not in heads]
    require(not missing, f"{file} has no column {', '.join(missing)}: it has {', '.join(heads)[:300]}")
    rows = []
    with file.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.DictReader(lines, strict=True)
        for line in reader:
            for column, name, text in parts:
                cells = {
                    **{key: given[key] for key in ("study", "model", "task")},
                    **{"arm": line[given["arm"]] or "", "seed": line[given["seed"]] or "", "step": str(step)},
                    **{"metric": name, "question": "", "value": line[column] or "", "n": "", "definition": text},
                    "source": file.name,
                }
                rows.append(row_of(cells, f"{file}, line {reader.line_num}, {column}"))
    notes = [f"one number a run, at step {step}: nothing is known of the steps before", "options of arms are not known"]
    return rows, About(tool, {row.arm: {} for row in rows}, {}, notes)


def _parts(text: str) -> tuple[str, str, str]:
    """COLUMN, the metric's name, and its definition: DEFINED or ours if the name is one of these."""
    column, _, rest = text.partition(":")
    name, _, told = rest.partition(":")
    require(bool(column and name), f"metric {text!r} must be COLUMN:NAME or COLUMN:NAME:DEFINITION")
    known = DEFINED.get(name) or definitions().get(name, "")
    require(
        bool(told or known),
        f"{name} is no metric of ours, so say what it is: metric={column}:{name}:'mean over ...' "
        "(all metrics: docs/reference/metrics.md)",
    )
    return column, name, told or known
