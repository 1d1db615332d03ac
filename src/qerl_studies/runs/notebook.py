"""What the notebooks share: the runs that are there, and a word where there is nothing to draw yet."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from qerl_core.checks import ConfigError, require
from qerl_studies.runs.find import find_runs
from qerl_studies.runs.load import Run, load_run

T = TypeVar("T")
COMPARISON = "python src/run.py -m quant=bf16,nvfp4 aqn=none,exp seed=0,1"


def finished_runs() -> list[Run]:
    """The finished runs in $QERL_ROOT/runs, by default in the checkout's; prints what is left out, and why."""
    folder = Path(os.environ.get("QERL_ROOT", ".."), "runs")
    runs = []
    for path in _found(folder):
        try:
            require(load_run(path, metrics=False).finished, f"{path} is not finished; the same command continues it")
            runs.append(load_run(path))
        except ConfigError as error:
            print("left out:", error)
    print(f"{len(runs)} finished runs in {folder}")
    if not runs:
        print("`make run` makes one in a few minutes; QERL_ROOT=FOLDER, set before Jupyter starts, reads FOLDER/runs")
    return runs


def _found(folder: Path) -> list[Path]:
    try:
        return find_runs(folder)
    except ConfigError:  # no such folder, or no run in it
        return []


def first_with_rollouts(runs: Sequence[Run]) -> Run:
    """The first run whose algorithm samples. Raises ConfigError without one."""
    chosen = [run for run in runs if run.option("algo.name") != "sft"]
    require(bool(chosen), "no finished run with rollouts")
    return chosen[0]


def shown(draw: Callable[[], T], command: str = COMPARISON) -> T | None:
    """What `draw` returns; None if these runs do not suffice: then the reason, and a command that makes such runs."""
    try:
        return draw()
    except ConfigError as error:
        print(f"Not drawn: {error}\nThis makes such runs, in the folder of the repository, and skips finished ones:")
        print(f"\n    {command}")
        return None
