"""List the runs below a folder: finished, running or unfinished, and how many of their steps they have made.

    qerl-bench status            # of ./runs, or $QERL_ROOT/runs
    qerl-bench status FOLDER ...
    qerl-bench status --json     # for programs: an object for each run

A run is running while a process on this machine holds its lock. An unfinished one continues by the command in its
env.json.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

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
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of lines")
    given = parser.parse_args(words)
    folders: list[Path] = given.folders
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    require(not missing, f"no folder {', '.join(missing)}; give the folder that holds the runs")
    runs = sorted({file.parent for folder in folders for file in folder.rglob("config.yaml") if is_run(file.parent)})
    rows = [row(run) for run in runs]
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    for one in rows:
        note = "".join(
            [f"  in {one['holder']}" if one["holder"] else "", f"  {one['damage']}" if one["damage"] else ""]
        )
        total = "?" if one["steps"] is None else one["steps"]
        print(f"{one['state']:10}  {one['step']:>6} of {total!s:<6}  {one['run']}{note}")
    counts = Counter(one["state"] for one in rows)
    print(f"{len(runs)} runs" + "".join(f", {counts[name]} {name}" for name in sorted(counts)))


def row(run: Path) -> dict[str, Any]:
    """The state of one run: its folder, the last step and all of them (None if the config is damaged), who runs it."""
    try:
        steps, damage = total_steps(run), None
    except ConfigError as error:
        steps, damage = None, str(error)
    now = state(run)
    who = holder(run / ".lock") if now == "running" else None
    return {"run": str(run), "state": now, "step": last_step(run), "steps": steps, "holder": who, "damage": damage}


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
