"""List the runs below a folder: finished, running or unfinished, and how many of their steps they have made.

    qerl-bench status            # of ./runs, or $QERL_ROOT/runs
    qerl-bench status FOLDER ...

A run is running while a process on this machine holds its lock. An unfinished one continues by the command in its
env.json.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

from qerl_bench.arguments import KeyValueParser
from qerl_bench.checks import ConfigError, require
from qerl_bench.locks import holder
from qerl_bench.rundir import is_finished
from qerl_bench.stored import read_config

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
        note = f"  in {holder(run / '.lock')}" if states[run] == "running" else ""
        try:
            total = str(total_steps(run))
        except ConfigError as error:
            total, note = "?", f"{note}  {error}"
        print(f"{states[run]:10}  {last_step(run):>6} of {total:<6}  {run}{note}")
    counts = Counter(states.values())
    print(f"{len(runs)} runs" + "".join(f", {counts[name]} {name}" for name in sorted(counts)))


def is_run(folder: Path) -> bool:
    """Whether `folder` is a run, and not Hydra's record of one, or another evaluation of a run."""
    return folder.name != ".hydra" and folder.parent.name != "evals"


def state(run: Path) -> str:
    """done, running or unfinished."""
    if is_finished(run):
        return "done"
    return "running" if holder(run / ".lock") else "unfinished"


def total_steps(run: Path) -> int:
    """The steps that the run's config asks for. Raises ConfigError if it is damaged, or of an earlier version."""
    config = read_config(run / "config.yaml")
    require("steps" in config, f"{run / 'config.yaml'} has no steps")
    return config["steps"]


def last_step(run: Path) -> int:
    """The last step in metrics.jsonl, damaged lines left out; 0 before the first."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")
    return max(map(step_of_line, lines[:-1]), default=0)  # a writer may be in the middle of the last one


def step_of_line(line: bytes) -> int:
    """The step of a record; 0 for a line that is damaged or begins before what was read."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0
