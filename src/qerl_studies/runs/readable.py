"""Leaves out what lies beside runs and cannot be read: folders of other programs, half copies, damaged runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from qerl_core.checks import ConfigError, require
from qerl_core.process.arguments import wrap_lines
from qerl_studies.runs.load import Run, load_run

T = TypeVar("T")


def whole_run(path: Path) -> Run:
    """`load_run` of a run whose options and answers can be read too. Raises ConfigError as they do."""
    run = load_run(path)
    run.identity()
    run.has_answers()
    return run


def readable(paths: Sequence[Path], load: Callable[[Path], T] = whole_run) -> tuple[list[T], dict[Path, str]]:
    """What `load` gives of each path, and why it refused others, by their paths; each of these is told to stderr.

    Raises ConfigError for one that stands alone, and if none can be read.
    """
    loaded: list[T] = []
    left_out: dict[Path, str] = {}
    for path in paths:
        try:
            loaded.append(load(path))
        except ConfigError as error:
            if len(paths) == 1:
                raise
            print(wrap_lines(f"left out: {error}"), file=sys.stderr)
            left_out[path] = str(error).replace(str(path), path.name)
    require(bool(loaded), f"none of the {len(paths)} runs can be read, for the reasons above")
    return loaded, left_out
