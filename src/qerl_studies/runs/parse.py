"""Reads metrics.jsonl; a damaged file is named, with the line. `rundir/read_files.py` reads the other files."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qerl_core.checks import ConfigError, require

NUMBER_TYPES = {int, float, bool, type(None)}
REMEDY = "Repair or remove this line, or leave the run out"
MAX_NAMES = 3  # in a message


def read_metrics(path: Path, finished: bool) -> pd.DataFrame:
    """The long table of metrics.jsonl: kind, step, metric, value.

    Lines with the same kind and keys form a matrix, so that no number is handled one by one. pyarrow's JSON reader is
    not used because it cannot tell a null from a key that a line does not have.
    """
    lines = path.read_bytes().split(b"\n")
    decode = json.JSONDecoder().decode
    last = max((number for number, line in enumerate(lines, start=1) if line.strip()), default=0)
    steps: dict[tuple[str, ...], list[int]] = {}
    values: dict[tuple[str, ...], list[list[float | None]]] = {}
    line_of: dict[tuple[str, int], int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = decode(line.decode())
        except ValueError as error:
            if number == last and not finished:
                warnings.warn(f"{path.parent}: dropped line {number}, the last, which is half-written", stacklevel=3)
                break
            raise ConfigError(f"{path}, line {number}: not JSON ({error}). {REMEDY}") from error
        kind, step = _check_line(record, f"{path}, line {number}")
        earlier = line_of.setdefault((kind, step), number)
        require(earlier == number, f"{path}, line {number}: step {step} ({kind}) repeats line {earlier}. {REMEDY}")
        steps.setdefault((kind, *record), []).append(step)
        values.setdefault((kind, *record), []).append([*record.values()])
    return long_table(steps, values)


def _check_line(record: Any, where: str) -> tuple[str, int]:
    """Take `kind` and `step` out of `record`, and check that everything else is a number."""
    require(isinstance(record, dict), f"{where}: not a JSON object. {REMEDY}")
    kind, step = record.pop("kind", None), record.pop("step", None)
    require(isinstance(kind, str), f"{where}: `kind` must be a text such as train or eval, got {kind!r}. {REMEDY}")
    require(type(step) is int and step >= 0, f"{where}: `step` must be a whole number >= 0, got {step!r}. {REMEDY}")
    if not NUMBER_TYPES.issuperset(map(type, record.values())):
        key, value = next((key, value) for key, value in record.items() if type(value) not in NUMBER_TYPES)
        raise ConfigError(f"{where}: {key} must be a number or null, got {value!r}. {REMEDY}")
    return kind, step


def long_table(steps: Mapping[tuple[str, ...], list[int]], values: Mapping[tuple[str, ...], list[Any]]) -> pd.DataFrame:
    """Matrices (lines, metrics) by (kind, *metrics) as one table, metric by metric, in order of first appearance."""
    kinds = list(dict.fromkeys(kind for kind, *_ in values))
    names = list(dict.fromkeys(name for _, *metrics in values for name in metrics))
    code = {name: place for place, name in enumerate(names)}
    columns: list[list[np.ndarray]] = [
        [np.zeros(0, dtype)] for dtype in (np.int32, np.int64, np.int32, np.float64)
    ]  # kind, step, metric, value
    for (kind, *metrics), rows in values.items():
        matrix = np.array(rows, dtype=np.float64).reshape(len(rows), len(metrics))
        columns[0].append(np.full(matrix.size, kinds.index(kind), np.int32))
        columns[1].append(np.tile(np.array(steps[(kind, *metrics)], np.int64), len(metrics)))
        columns[2].append(np.repeat(np.array([code[name] for name in metrics], np.int32), len(rows)))
        columns[3].append(np.where(np.isfinite(matrix), matrix, np.nan).ravel(order="F"))
    kind_codes, step, metric_codes, value = map(np.concatenate, columns)
    return pd.DataFrame(
        {
            "kind": pd.Categorical.from_codes(kind_codes, pd.Index(kinds, dtype="str")),
            "step": step,
            "metric": pd.Categorical.from_codes(metric_codes, pd.Index(names, dtype="str")),
            "value": value,
        }
    )


def first_names(names: Iterable[str]) -> str:
    """The first few of `names`, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(names[:MAX_NAMES])}{more}"
