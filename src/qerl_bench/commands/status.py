"""List the runs below a folder: what each is doing, how many of its steps it has made, and how long it will take.

    qerl-bench status            # of ./runs, or $QERL_ROOT/runs
    qerl-bench status FOLDER ...
    qerl-bench status --watch    # every few seconds, without what is done, until nothing goes on
    qerl-bench status --json     # for programs: a list with an object for each run

    done        all numbers are there
    damaged     done, but a file is not as the run wrote it, with the remedy
    running     a process holds its lock, here or on another machine that shares the file
                system; where, and since when
    queued      a job of a scheduler will run it
    waiting     a sweep that goes on will start or continue it
    failed      the last attempt ended by itself, with the reason; the same command tries again
    unfinished  was stopped or killed; the same command, which its env.json has, continues it

Everything is read from the run directories. Slurm is asked, where it answers, whether your own queued
jobs are still there, and nothing else.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median

from qerl_core.checks import ConfigError, require
from qerl_core.process.arguments import KeyValueParser
from qerl_core.process.progress import duration
from qerl_core.rundir.checksums import DONE
from qerl_core.rundir.read_files import read_object
from qerl_core.rundir.recorded_types import RESULT, require_environment, require_kinds
from qerl_core.sweeps.status import GOES_ON, Status, statuses
from qerl_studies.runs.cost import Cost, total_cost

WATCH_S = 5.0


def main(words: list[str]) -> None:
    parser = KeyValueParser(__doc__)
    default = Path(os.environ.get("QERL_ROOT", "."), "runs")
    parser.add_argument("folders", nargs="*", type=Path, default=[default], help="folders that hold runs, or runs")
    parser.add_argument("--watch", action="store_true", help="again every few seconds, until nothing goes on")
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of lines")
    given = parser.parse_args(words)
    require(not (given.watch and given.json), "--watch and --json do not go together; choose one")
    missing = [str(folder) for folder in given.folders if not folder.is_dir()]
    require(not missing, f"no folder {', '.join(missing)}; give the folder that holds the runs")
    if given.json:
        runs = statuses(given.folders)
        print(json.dumps([status._asdict() | {"run": str(status.run)} for status in runs], indent=1))
        return
    while True:
        runs = statuses(given.folders)
        if told := lines([status for status in runs if status.state != "done"] if given.watch else runs):
            print("\n".join(told))
        print(summary(runs), flush=True)
        if (cost := cost_of(runs)).runs:
            print(f"cost of the finished runs: {cost}", flush=True)
        if not given.watch or not any(status.state in GOES_ON for status in runs):
            return
        time.sleep(WATCH_S)
        print(f"\n{time.strftime('%H:%M:%S')}")


def lines(runs: list[Status]) -> list[str]:
    rows = []
    for status in runs:
        left = status.left * status.step_s if status.step_s and status.state == "running" else 0
        notes = filter(None, [status.note, f"about {duration(left)} left" if left else ""])
        total = "?" if status.steps is None else status.steps
        rows.append("  ".join([f"{status.state:10}", f"{status.step:>6} of {total!s:<6}", str(status.run), *notes]))
    return rows


def summary(runs: list[Status]) -> str:
    """How many runs there are of each state, and about how long all will take with as many at a time as now."""
    counts = Counter(status.state for status in runs)
    if not runs:
        return "0 runs: a run is a folder with a config.yaml; what a study packed: qerl-bench report STUDY"
    counted = f"{len(runs)} runs" + "".join(f", {counts[name]} {name}" for name in sorted(counts))
    paces = [status.step_s for status in runs if status.step_s]
    sizes = [status.steps for status in runs if status.steps] or [0]
    if not counts["running"] or not paces:
        return counted
    usual = median(paces)
    goes_on = [status for status in runs if status.state in GOES_ON]
    seconds = sum((status.left if status.steps else median(sizes)) * (status.step_s or usual) for status in goes_on)
    return f"{counted}; about {duration(seconds / counts['running'])} left" if seconds else counted


def cost_of(found: list[Status]) -> Cost:
    """What the finished runs took; those whose records are damaged are left out."""
    records = []
    for status in found:
        with suppress(ConfigError, OSError):
            if status.state == "done":
                done, env = (read_object(status.run / name, "") for name in (DONE, "env.json"))
                require_kinds(DONE, done, RESULT, "")
                require_environment("env.json", env, "")
                records.append((done, env))
    return total_cost(records)
