"""What every launcher of sweeps says: how far the runs are, and at the end one table of all of them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from heapq import heapify, heapreplace
from pathlib import Path
from typing import NamedTuple

from qerl_bench.checks import ConfigError
from qerl_bench.options.fingerprint import flat, with_effect
from qerl_bench.process.progress import duration
from qerl_bench.rundir.checkpoints import last_checkpoint, step_of
from qerl_bench.sweep.status import last_step, seconds_per_step, total_steps

AROUND = 0.2  # of the time of a run: imports, loading and evaluations, which one that is continued takes again


def sweep_table(run_dirs: Sequence[Path]) -> str:
    """One table of all runs of a sweep, in the given order, and where they are.

    Below it are the runs without numbers to show, such as those that failed before their first step. Takes a second
    for the imports, and some 10 ms per run.
    """
    import pandas as pd  # takes a second, which no run waits for

    from qerl_bench.studies.runs.load import load_run
    from qerl_bench.studies.tables.terminal import differences, render, row_of

    rows, configs, others = [], [], []
    with warnings.catch_warnings(action="ignore"):  # the half-written last line of a run that goes on elsewhere
        for folder in run_dirs:
            try:
                run = load_run(folder)
                rows.append(row_of(run))
                configs.append(flat(with_effect(run.config)))
            except ConfigError as error:
                others.append(f"no numbers: {folder}: {str(error).partition('. ')[0]}")
    places = f"{len(run_dirs)} runs in {_common(run_dirs)}; the curves of each are in NAME/figures"
    table = [render(pd.DataFrame(rows), differences(configs))] if rows else []
    return "\n".join([*table, *others, places])


def _common(run_dirs: Sequence[Path]) -> str:
    """The folder that holds all runs."""
    return os.path.commonpath([folder.absolute().parent for folder in run_dirs])


def share_done(run_dir: Path) -> float:
    """Steps made over all steps of a run, 0 to 1; 0 before its config and first step are on disk."""
    try:
        return min(1.0, last_step(run_dir) / total_steps(run_dir))
    except (ConfigError, OSError):
        return 0.0


def share_to_make(run_dir: Path) -> float:
    """The share of the time of a whole run that a run takes which is begun now, or continued from its checkpoint."""
    with suppress(ConfigError, OSError):
        if checkpoint := last_checkpoint(run_dir):
            return min(1.0, 1.0 - step_of(checkpoint) / total_steps(run_dir) + AROUND)
    return 1.0


def counts(total: int, done: int, running: Sequence[float], failed: int, left_s: float | None) -> str:
    """Points of a sweep in one line: "3 of 12 runs done, 2 running (40%, 5%), 1 failed, about 14:00 left".

    `running` has the share of its steps that each has made.
    """
    shares = f" ({', '.join(f'{share:.0%}' for share in running)})" if running else ""
    left = "" if left_s is None else f", about {duration(left_s)} left"
    return f"{done} of {total} runs done, {len(running)} running{shares}, {failed} failed{left}"


def run_left(run_dir: Path) -> float | None:
    """Seconds for the steps that a run has still to make, at the pace of its last ones; None before the second."""
    with suppress(ConfigError, OSError):
        if pace := seconds_per_step(run_dir):
            return max(0, total_steps(run_dir) - last_step(run_dir)) * pace
    return None


class Pace(NamedTuple):
    """How far a run is that goes on."""

    so_far: float  # seconds
    left: float | None  # seconds; None: not known yet
    share: float = 1.0  # of the time of a whole run, which it takes in all


def time_left(running: Sequence[Pace], took: Sequence[float], to_start: Sequence[float], slots: int) -> float | None:
    """Seconds until a sweep ends, if each run that goes on keeps its pace, and each of those `to_start` takes this
    share of the mean of all whole ones whose time is known or foreseen. None while nothing is known of any.

    A run starts in the slot that is free first. It begins with imports and the loading of its model, which its pace
    leaves out.
    """
    whole = [*took, *(one.so_far + one.left for one in running if one.left is not None and one.share == 1)]
    if not whole:
        return None
    usual = sum(whole) / len(whole)
    free_in = [max(0.0, one.share * usual - one.so_far) if one.left is None else one.left for one in running]
    free_in += [0.0] * (slots - len(running))
    heapify(free_in)
    for share in to_start:
        heapreplace(free_in, free_in[0] + share * usual)
    return max(free_in)
