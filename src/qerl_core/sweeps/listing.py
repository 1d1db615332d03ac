"""Lists the points of a running sweep in a file beside its runs, so that `qerl-bench status` shows those to come."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from qerl_core.rundir.durable import write_atomically
from qerl_core.rundir.locks import holder, lock

FOLDER = ".sweeps"


@contextmanager
def listed(folder: Path, run_dirs: Sequence[Path]) -> Iterator[None]:
    """In this block the sweep of `run_dirs` is listed in `folder`, as one that goes on. Once, on however many machines
    the same sweep goes on."""
    runs = json.dumps([str(path.absolute()) for path in run_dirs], indent=1)
    place = folder / FOLDER / f"{hashlib.sha256(runs.encode()).hexdigest()[:16]}.json"
    held = None
    with suppress(FileNotFoundError):  # another sweep ended just now, and removed the folder
        place.parent.mkdir(parents=True, exist_ok=True)
        held = lock(place.with_suffix(".lock"))
    try:
        if held is not None:
            write_atomically(place, runs)
        yield
    finally:
        if held is not None:
            place.unlink(missing_ok=True)
            place.with_suffix(".lock").unlink(missing_ok=True)
            held.close()
        with suppress(OSError):  # another sweep is listed there
            place.parent.rmdir()


def going_on(folder: Path) -> dict[Path, float]:
    """The run directories of all sweeps that are listed in `folder` and go on, and when the last of them began, in unix
    seconds."""
    places = [place for place in (folder / FOLDER).glob("*.json") if holder(place.with_suffix(".lock"))]
    runs: dict[Path, float] = {}
    for place in places:
        with suppress(FileNotFoundError):  # that sweep ended just now
            began = place.stat().st_mtime
            for run in map(Path, json.loads(place.read_text())):
                runs[run] = max(began, runs.get(run, began))
    return runs
