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
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from qerl_bench.checks import ConfigError, require
from qerl_bench.process.arguments import KeyValueParser
from qerl_bench.process.failure import MARK
from qerl_bench.process.progress import duration
from qerl_bench.rundir.checkpoints import is_finished
from qerl_bench.rundir.checksums import DONE
from qerl_bench.rundir.locks import holder
from qerl_bench.rundir.read_files import read_config, read_object
from qerl_bench.rundir.run_checks import refuse_damaged
from qerl_bench.studies.runs.cost import Cost, total_cost
from qerl_bench.sweep.listing import going_on

TAIL_BYTES = 1 << 16  # more than the records of one step
WATCH_S = 5.0
GOES_ON = ("running", "queued", "waiting")
STOPPED = ("SIG", "Ctrl-C")  # reasons of runs that somebody ended


class Status(NamedTuple):
    """What is known of a run. Steps are None where its config is damaged, seconds where nothing was measured."""

    run: Path
    state: str
    step: int
    steps: int | None
    step_s: float | None  # seconds per step
    note: str = ""

    @property
    def left(self) -> int:
        """Steps that are still to make."""
        return max(0, (self.steps or 0) - self.step)

    def as_object(self) -> dict[str, Any]:
        return {**self._asdict(), "run": str(self.run)}


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
        print(json.dumps([status.as_object() for status in statuses(given.folders)], indent=1))
        return
    while True:
        found = statuses(given.folders)
        print("\n".join(lines([status for status in found if status.state != "done"] if given.watch else found)))
        print(summary(found), flush=True)
        if (cost := cost_of(found)).runs:
            print(f"cost of the finished runs: {cost}", flush=True)
        if not given.watch or not any(status.state in GOES_ON for status in found):
            return
        time.sleep(WATCH_S)
        print(f"\n{time.strftime('%H:%M:%S')}")


def statuses(folders: list[Path]) -> list[Status]:
    """The status of each run below `folders`, and of those that a sweep which goes on there has yet to start."""
    runs = {run for folder in folders for run in runs_below(folder)}
    known = {run.absolute() for run in runs}
    swept = {run: folder for folder in folders for run in going_on(folder)}
    coming = [below(run, swept[run]) for run in sorted(swept.keys() - known) if not is_finished(run)]
    queue = cache(own_jobs)  # Slurm is asked once, and only if a run seems to be queued
    return [
        *(status_of(run, run.absolute() in swept, queue) for run in sorted(runs)),
        *(status_of(run, True, queue) for run in coming),
    ]


def below(run: Path, folder: Path) -> Path:
    """An absolute path as seen from where `folder` is seen from."""
    return folder / run.relative_to(folder.absolute()) if run.is_relative_to(folder.absolute()) else run


def runs_below(folder: Path) -> Iterator[Path]:
    """The runs in a folder. What lies in a run is none: Hydra's record of it, or another evaluation of it."""
    for place, folders, files in os.walk(folder):
        if "config.yaml" in files or "job.json" in files:
            yield Path(place)
        folders[:] = [name for name in folders if not name.startswith(".") and name not in ("evals", "checkpoints")]


def status_of(run: Path, swept: bool, queue: Callable[[], Container[str] | None]) -> Status:
    """The status of a run; one that is `swept` belongs to a sweep that goes on, and will be started by it.

    `queue` gives the jobs that Slurm has; None if it does not answer.
    """
    state, note = state_of(run)
    if state == "queued" and is_gone(run / "job.json", queue):
        state, note = "unfinished", f"job {job_in(run / 'job.json').get('job')} left the queue before it began"
    if swept and state == "unfinished":
        state = "waiting"
    steps, records = None, tail(run)
    if (run / "config.yaml").exists():
        try:
            steps = total_steps(run)
        except ConfigError as error:
            note = note if state == "damaged" else f"{note}  {error}"
    return Status(run, state, step_of(records), steps, pace_of(records), note)


def state_of(run: Path) -> tuple[str, str]:
    """The state of a run, and what there is to say about it."""
    with suppress(FileNotFoundError):
        damage = damage_of(run, (run / DONE).stat().st_mtime_ns)
        return ("damaged", damage) if damage else ("done", "")
    if who := holder(run / ".lock"):
        return "running", f"in {who}"
    log, job = run / "run.log", run / "job.json"
    if job.exists() and (not log.exists() or log.stat().st_mtime < job.stat().st_mtime):
        return "queued", f"as job {described(job_in(job))}"
    reason = last_failure(log)
    if reason is None or reason.startswith(STOPPED):
        return "unfinished", "" if reason is None else f"stopped by {reason.rstrip(': ')}"
    return "failed", reason


@cache
def damage_of(run: Path, finished_ns: int) -> str | None:
    """What is wrong with a run that was finished at this time, as the run itself would say; None if it is whole.

    That is looked up once, since files of a finished run are hashed for it.
    """
    try:
        refuse_damaged(run)
    except (ConfigError, OSError) as error:
        return str(error)
    return None


def job_in(path: Path) -> dict[str, Any]:
    """What a job.json says; nothing if it is damaged."""
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def described(job: dict[str, Any]) -> str:
    """A job, and when it was submitted; empty for a damaged one."""
    try:
        return f"{job['job']} since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(job['submitted']))}"
    except (KeyError, TypeError):
        return ""


def is_gone(path: Path, queue: Callable[[], Container[str] | None]) -> bool:
    """Whether Slurm no longer has the job of a job.json; not known, hence false, of the jobs of other users."""
    job = job_in(path)
    if job.get("scheduler") != "slurm" or path.stat().st_uid != os.getuid():
        return False
    jobs = queue()
    return jobs is not None and str(job.get("job")) not in jobs


def own_jobs() -> Container[str] | None:
    """This user's jobs in Slurm's queue; None where there is no Slurm, or none that answers."""
    from qerl_bench.sweep.slurm_queue import NoAnswer, read_queue  # which takes half a second to import

    try:
        return read_queue()
    except (FileNotFoundError, NoAnswer):
        return None


def last_failure(log: Path) -> str | None:
    """Why the last attempt ended early, from run.log; None if that is not said, or a later attempt began."""
    if not log.exists():
        return None
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        said = file.read().decode(errors="replace").splitlines()
    dated = [line for line in said if line[:8].count(":") == 2]  # others belong to a traceback
    return dated[-1].partition(MARK)[2].strip() if dated and MARK in dated[-1] else None


def total_steps(run: Path) -> int:
    """The steps that the run's config asks for. Raises ConfigError if it is damaged, or of an earlier version."""
    config = read_config(run / "config.yaml")
    require("steps" in config, f"{run / 'config.yaml'} has no steps")
    return config["steps"]


def last_step(run: Path) -> int:
    """The last step in metrics.jsonl, damaged lines left out; 0 before the first."""
    return step_of(tail(run))


def seconds_per_step(run: Path) -> float | None:
    """Median time between the last training steps; None before the second."""
    return pace_of(tail(run))


def step_of(records: list[dict[str, Any]]) -> int:
    return max((int(record["step"]) for record in records), default=0)


def pace_of(records: list[dict[str, Any]]) -> float | None:
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


def lines(found: list[Status]) -> list[str]:
    told = []
    for status in found:
        left = status.left * status.step_s if status.step_s and status.state == "running" else 0
        notes = filter(None, [status.note, f"about {duration(left)} left" if left else ""])
        total = "?" if status.steps is None else status.steps
        told.append("  ".join([f"{status.state:10}", f"{status.step:>6} of {total!s:<6}", str(status.run), *notes]))
    return told


def summary(found: list[Status]) -> str:
    """How many runs there are of each state, and about how long all will take with as many at a time as now."""
    counts = Counter(status.state for status in found)
    told = f"{len(found)} runs" + "".join(f", {counts[name]} {name}" for name in sorted(counts))
    paces = [status.step_s for status in found if status.step_s]
    sizes = [status.steps for status in found if status.steps] or [0]
    if not counts["running"] or not paces:
        return told
    usual = median(paces)
    goes_on = [status for status in found if status.state in GOES_ON]
    seconds = sum((status.left if status.steps else median(sizes)) * (status.step_s or usual) for status in goes_on)
    return f"{told}; about {duration(seconds / counts['running'])} left" if seconds else told


def cost_of(found: list[Status]) -> Cost:
    """What the finished runs took; those whose records are damaged are left out."""
    records = []
    for status in found:
        with suppress(ConfigError, OSError):
            if status.state == "done":
                records.append(tuple(read_object(status.run / name, "") for name in (DONE, "env.json")))
    return total_cost(records)
