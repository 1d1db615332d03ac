"""Reads metrics.jsonl; a damaged file is named, with the line. `rundir/read_files.py` reads the other files."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qerl_core.checks import ConfigError, require

NUMBER_TYPES = {int, float, bool, type(None)}
REMEDY = "Repair or remove this line, or leave the run out"
MAX_NAMES = 3  # in a message


Steps = dict[tuple[str, ...], list[int]]  # by (kind, *metrics) those of the lines, in their order
Values = dict[tuple[str, ...], list[list[float | None]]]  # and their numbers


def read_lines(path: Path, finished: bool) -> tuple[Steps, Values]:
    """What is in metrics.jsonl, for `long_table`.

    Lines with the same kind and keys form a matrix, so that no number is handled one by one. pyarrow's JSON reader is
    not used because it cannot tell a null from a key that a line does not have.
    """
    lines = path.read_bytes().split(b"\n")
    decode = json.JSONDecoder().decode
    last = max((number for number, line in enumerate(lines, start=1) if line.strip()), default=0)
    steps: Steps = {}
    values: Values = {}
    line_of: dict[tuple[str, int], int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = decode(line.decode())
        except ValueError as error:
            if number == last and not finished:
                warnings.warn(f"{path.parent}: dropped line {number}, the last, which is half-written", stacklevel=5)
                break
            raise ConfigError(f"{path}, line {number}: not JSON ({error}). {REMEDY}") from error
        kind, step = _check_line(record, f"{path}, line {number}")
        earlier = line_of.setdefault((kind, step), number)
        require(earlier == number, f"{path}, line {number}: step {step} ({kind}) repeats line {earlier}. {REMEDY}")
        steps.setdefault((kind, *record), []).append(step)
        values.setdefault((kind, *record), []).append([*record.values()])
    return steps, values


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
    """Matrices (lines, metrics) as one table, kind, step, metric, value; by metric, in order of first appearance."""
    numbers = [np.array(rows, dtype=np.float64).ravel(order="F") for rows in values.values()]
    value = np.concatenate([np.zeros(0), *numbers])
    value[~np.isfinite(value)] = np.nan
    return _written(tuple((key, *steps[key]) for key in values)).assign(value=value)


@lru_cache(maxsize=1024)
def _written(lines: tuple[tuple[Any, ...], ...]) -> pd.DataFrame:
    """The table without its values, which runs of one length share: for each (kind, *metrics) that, and its steps."""
    kinds = list(dict.fromkeys(kind for (kind, *_), *_ in lines))
    names = list(dict.fromkeys(name for (_, *metrics), *_ in lines for name in metrics))
    code = {name: place for place, name in enumerate(names)}
    columns: list[list[np.ndarray]] = [[np.zeros(0, dtype)] for dtype in (np.int32, np.int64, np.int32)]
    for (kind, *metrics), *steps in lines:
        columns[0].append(np.full(len(steps) * len(metrics), kinds.index(kind), np.int32))
        columns[1].append(np.tile(np.array(steps, np.int64), len(metrics)))
        columns[2].append(np.repeat(np.array([code[name] for name in metrics], np.int32), len(steps)))
    kind_codes, step, metric_codes = map(np.concatenate, columns)
    return pd.DataFrame(
        {
            "kind": pd.Categorical.from_codes(kind_codes, pd.Index(kinds, dtype="str")),
            "step": step,
            "metric": pd.Categorical.from_codes(metric_codes, pd.Index(names, dtype="str")),
        }
    )


Places = Mapping[tuple[str, str], tuple[np.ndarray, pd.Index]]


def places_of(metrics: pd.DataFrame) -> Places:
    """Of each (kind, metric) in a long table its rows in the order of their steps, and these steps."""
    coded = [pd.Categorical(metrics[name]) for name in ("kind", "metric")]
    steps = metrics["step"].to_numpy()
    kinds, names = (tuple(map(str, column.categories)) for column in coded)
    codes = [column.codes.astype(np.int32).tobytes() for column in coded]
    return _places(kinds, names, *codes, steps.dtype, steps.tobytes())


@lru_cache(maxsize=64)
def _places(
    kinds: tuple[str, ...], metrics: tuple[str, ...], kind_codes: bytes, codes: bytes, dtype: np.dtype, steps: bytes
) -> Places:
    """`places_of`, once for all runs that have the same numbers at the same steps: they share it."""
    pair = np.frombuffer(kind_codes, np.int32).astype(np.int64) * len(metrics) + np.frombuffer(codes, np.int32)
    step = np.frombuffer(steps, dtype)
    order = np.lexsort((step, pair))
    found, starts = np.unique(pair[order], return_index=True)
    rows = np.split(order, starts[1:])
    keys = [(kinds[one // len(metrics)], metrics[one % len(metrics)]) for one in found.tolist()]
    return {key: (of_key, pd.Index(step[of_key])) for key, of_key in zip(keys, rows, strict=False)}


def first_names(names: Iterable[str]) -> str:
    """The first few of `names`, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(names[:MAX_NAMES])}{more}"
