"""Reads a run from its own folder: each file once, and checked. What thousands of runs have in common is held once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd

from qerl_core.checks import ConfigError, require
from qerl_core.rundir.checkpoints import is_finished
from qerl_core.rundir.checksums import DONE
from qerl_core.rundir.read_files import read_config, read_object
from qerl_core.rundir.recorded_types import RESULT, require_config, require_environment, require_kinds
from qerl_core.rundir.run_checks import check_seals, check_steps, damage_remedy, whole_lines
from qerl_studies.runs import parse

OUT, OTHERWISE = "Leave the run out", "Or leave the run out"
NOT_KEPT = ("final", "seals")  # of done.json: the metrics have the former, and the latter are checked here
_HELD: dict[str, dict[str, Any]] = {}  # by their texts

Parts = tuple[dict[str, Any], dict[str, Any], bool, dict[str, Any], pd.DataFrame]


def read_folder(path: Path, metrics: bool) -> Parts:
    """Config, env.json, whether the run is finished, done.json and the long table of its metrics.

    Raises ConfigError for a damaged file, naming it and the line; without `metrics` the table is empty and nothing is
    checked.
    """
    for name in ("config.yaml", "metrics.jsonl"):
        require((path / name).is_file(), f"{path} is not a run directory: it has no {name}")
    finished = is_finished(path)
    due = metrics and check_seals(path, OTHERWISE)
    config = read_config(path / "config.yaml")
    table = _table(path, finished, config.get("steps") if due else None) if metrics else parse.long_table({}, {})
    environment, done = (_object(path, name, finished) for name in ("env.json", DONE))
    require_config(str(path / "config.yaml"), config, OUT)
    require_environment(str(path / "env.json"), environment, OUT)
    require_kinds(str(path / DONE), done, RESULT, OUT)
    kept = {key: value for key, value in done.items() if key not in NOT_KEPT}
    return _shared(config), _shared(environment), finished, kept, table


def held(part: dict[str, Any]) -> dict[str, Any]:
    """The first mapping with this text, which stays until the program ends."""
    return _HELD.setdefault(repr(part), part)


def _shared(content: dict[str, Any]) -> dict[str, Any]:
    return {sys.intern(key): held(part) if isinstance(part, dict) else part for key, part in content.items()}


def _table(path: Path, finished: bool, due: object) -> pd.DataFrame:
    """The metrics of the run in `path`, which has a train line of each of the steps that are `due`, if any."""
    try:
        steps, values = parse.read_lines(path / "metrics.jsonl", finished)
    except ConfigError:  # what can be saved is told first
        check_steps(path, whole_lines(path / "metrics.jsonl"), due, OTHERWISE)
        raise
    lines = ({"kind": kind, "step": step} for (kind, *_), of_kind in steps.items() for step in of_kind)
    check_steps(path, lines, due, OTHERWISE)
    return parse.long_table(steps, values)


def _object(run: Path, name: str, finished: bool) -> dict[str, Any]:
    """The object in a JSON file of a run; empty without the file."""
    return read_object(run / name, damage_remedy(run, name, finished)) if (run / name).is_file() else {}
