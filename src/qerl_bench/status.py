"""List the runs below a folder: finished, running or unfinished, and how many of their steps they have made.

    qerl-bench status            # of ./runs, or $QERL_ROOT/runs
    qerl-bench status FOLDER ...

A run is running while a process on this machine holds its lock. An unfinished one continues by the command in its
env.json.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from pathlib import Path

import yaml

from qerl_bench.arguments import KeyValueParser
from qerl_bench.checks import require
from qerl_bench.rundir import is_finished

TAIL_BYTES = 1 << 16  # more than the records of one step


def main(words: list[str]) -> None:
    parser = KeyValueParser(__doc__)
    default = Path(os.environ.get("QERL_ROOT", "."), "runs")
    parser.add_argument("folders", nargs="*", type=Path, default=[default], help="folders that hold runs, or runs")
    folders = parser.parse_args(words).folders
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    require(not missing, f"no folder {', '.join(missing)}; give the folder that holds the runs")
    runs = sorted({file.parent for folder in folders for file in folder.rglob("config.yaml") if is_run(file.parent)})
    states = {run: state(run) for run in runs}
    for run in runs:
        print(f"{states[run]:10}  {last_step(run):>6} of {total_steps(run):<6}  {run}")
    counts = Counter(states.values())
    print(f"{len(runs)} runs" + "".join(f", {counts[name]} {name}" for name in sorted(counts)))


def is_run(folder: Path) -> bool:
    """Whether `folder` is a run, and not Hydra's record of one, or another evaluation of a run."""
    return folder.name != ".hydra" and folder.parent.name != "evals"


def state(run: Path) -> str:
    """done, running or unfinished."""
    if is_finished(run):
        return "done"
    try:
        with open(run / ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "running"
    except FileNotFoundError:
        pass
    return "unfinished"


def total_steps(run: Path) -> int:
    """The steps that the run's config asks for."""
    return yaml.safe_load((run / "config.yaml").read_text())["steps"]


def last_step(run: Path) -> int:
    """The last step in metrics.jsonl; 0 before the first."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")
    whole = [line for line in lines[:-1] if line.startswith(b"{")]  # a writer may be in the middle of the last one
    return max((json.loads(line)["step"] for line in whole), default=0)
