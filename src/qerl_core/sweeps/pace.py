"""How far the runs of a sweep are, and how long the rest will take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from heapq import heapify, heapreplace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from qerl_core.checks import ConfigError, require
from qerl_core.process.progress import duration
from qerl_core.rundir.checkpoints import last_checkpoint, step_of
from qerl_core.rundir.read_files import read_config

AROUND = 0.2  # of the time of a run: imports, loading and evaluations, which one that is continued takes again


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
        if pace := pace_of(tail(run_dir)):
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


TAIL_BYTES = 1 << 16  # more than the records of one step


def total_steps(run: Path) -> int:
    """The steps that the run's config asks for. Raises ConfigError if it is damaged, or of an earlier version."""
    file = run / "config.yaml"
    require(file.is_file(), f"{run} has no config.yaml: put back a copy of it, or delete the folder")
    steps: Any = read_config(file).get("steps")
    require(type(steps) is int, f"{file} has no number of steps: put back a copy of it, or delete the folder")
    return steps


def last_step(run: Path) -> int:
    """The last step in metrics.jsonl, damaged lines left out; 0 before the first."""
    return latest_step(tail(run))


def latest_step(records: list[dict[str, Any]]) -> int:
    return max((int(record["step"]) for record in records), default=0)


def pace_of(records: list[dict[str, Any]]) -> float | None:
    """Median time between the last training steps; None before the second."""
    times = [record["time"] for record in records if record.get("kind") == "train" and "time" in record]
    gaps = [later - earlier for earlier, later in pairwise(times) if later > earlier]
    return median(gaps) if gaps else None


def tail(run: Path) -> list[dict[str, Any]]:
    """The last records of metrics.jsonl, damaged lines left out."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        written = file.read().split(b"\n")
    return [record for line in written[:-1] if (record := record_of(line)) is not None]  # the last may be half written


def record_of(line: bytes) -> dict[str, Any] | None:
    """A record that has a step; None for a line that is damaged or begins before what was read."""
    try:
        record = json.loads(line)
        int(record["step"])
    except (ValueError, KeyError, TypeError):
        return None
    return record
