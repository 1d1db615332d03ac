"""The files of a run directory as Python objects; damage is named by file and line."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from qerl_bench.checks import ConfigError, require
from qerl_bench.renamed_keys import require_current

NUMBERS = {int, float, bool, type(None)}
REMEDY = "Repair or remove this line, or leave the run out"


class _Loader(yaml.CSafeLoader):
    """YAML as OmegaConf reads it, 1e-5 being a number, by the parser that is written in C."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.\d[\d_]*([eE][-+]?\d+)?)$"),
    list("-+0123456789."),
)


def read_config(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        config = yaml.load(text, _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a resolved config: {error}") from error
    require("${" not in text, f"{path} is not a resolved config: it refers to other keys with ${{...}}")
    require(isinstance(config, dict) and bool(config), f"{path} is empty or no mapping: it must hold the run's config")
    require_current(config, path.parent)
    return {str(key): value for key, value in config.items()}


def read_object(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(
            f"{path} is not JSON ({error}): delete it, and run the same command again to finish"
        ) from error
    require(isinstance(read, dict), f"{path} must hold one JSON object: delete it, and run the same command again")
    return read


def read_metrics(path: Path, finished: bool) -> pd.DataFrame:
    """Lines with the same kind and keys form a matrix, so no number is handled by itself."""
    lines = path.read_bytes().split(b"\n")
    decode = json.JSONDecoder().decode
    last = max((number for number, line in enumerate(lines, start=1) if line.strip()), default=0)
    steps: dict[tuple[str, ...], list[int]] = {}
    values: dict[tuple[str, ...], list[list[float | None]]] = {}
    written: dict[tuple[str, int], int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = decode(line.decode())
        except ValueError as error:
            if number == last and not finished:
                warnings.warn(f"{path.parent}: line {number}, the last, is half-written and was dropped", stacklevel=3)
                break
            raise ConfigError(f"{path}, line {number}: not JSON ({error}). {REMEDY}") from error
        kind, step = _checked(record, f"{path}, line {number}")
        earlier = written.setdefault((kind, step), number)
        require(
            earlier == number, f"{path}, line {number}: step {step} ({kind}) is already on line {earlier}. {REMEDY}"
        )
        keys = (kind, *record)
        steps.setdefault(keys, []).append(step)
        values.setdefault(keys, []).append(list(record.values()))
    return long(steps, values)


def _checked(record: Any, where: str) -> tuple[str, int]:
    """Take `kind` and `step` out of `record` and check that the rest are numbers."""
    require(isinstance(record, dict), f"{where}: not a JSON object. {REMEDY}")
    kind, step = record.pop("kind", None), record.pop("step", None)
    require(isinstance(kind, str), f"{where}: `kind` must be a text such as train or eval, not {kind!r}. {REMEDY}")
    require(type(step) is int and step >= 0, f"{where}: `step` must be a whole number >= 0, not {step!r}. {REMEDY}")
    if not NUMBERS.issuperset(map(type, record.values())):
        key, value = next((key, value) for key, value in record.items() if type(value) not in NUMBERS)
        raise ConfigError(f"{where}: {key} must be a number or null, not {value!r}. {REMEDY}")
    return kind, step


def long(steps: dict[tuple[str, ...], list[int]], values: dict[tuple[str, ...], list[list[Any]]]) -> pd.DataFrame:
    """The matrices (lines, metrics) laid end to end, metric by metric, in the order in which they first appear."""
    kinds = list(dict.fromkeys(kind for kind, *_ in values))
    names = list(dict.fromkeys(name for _, *metrics in values for name in metrics))
    place = {name: code for code, name in enumerate(names)}
    parts: list[tuple[np.ndarray, ...]] = [
        (np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0))
    ]
    for (kind, *metrics), rows in values.items():
        matrix = np.array(rows, dtype=np.float64).reshape(len(rows), len(metrics))
        codes = np.array([place[name] for name in metrics], np.int32)
        parts.append(
            (
                np.full(matrix.size, kinds.index(kind), np.int32),
                np.tile(np.array(steps[(kind, *metrics)], dtype=np.int64), len(metrics)),
                np.repeat(codes, len(rows)),
                np.where(np.isfinite(matrix), matrix, np.nan).ravel(order="F"),
            )
        )
    kind, step, metric, value = (np.concatenate(column) for column in zip(*parts, strict=True))
    return pd.DataFrame(
        {
            "kind": pd.Categorical.from_codes(kind, pd.Index(kinds, dtype="str")),
            "step": step,
            "metric": pd.Categorical.from_codes(metric, pd.Index(names, dtype="str")),
            "value": value,
        }
    )
