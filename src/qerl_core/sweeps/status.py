"""The state of each run below a folder, read from the run directories; Slurm is asked about queued jobs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from qerl_core.checks import ConfigError, require
from qerl_core.file_state import FileState, file_state
from qerl_core.process.failure import MARK
from qerl_core.rundir.checkpoints import is_finished
from qerl_core.rundir.checksums import DONE
from qerl_core.rundir.locks import holder
from qerl_core.rundir.read_files import REMEDY, read_config, read_object, read_table
from qerl_core.rundir.recorded_types import RESULT, require_config, require_environment, require_kinds
from qerl_core.rundir.run_checks import refuse_damaged, vouched_seals
from qerl_core.sweeps.listing import going_on
from qerl_core.sweeps.pace import TAIL_BYTES, latest_step, pace_of, record_of, tail, total_steps

GOES_ON = ("running", "queued", "waiting")
STOPPED = ("SIG", "Ctrl-C")  # reasons of runs that somebody ended
ENDED = ("done", "damaged", "failed", "unfinished")
RECORDS = {"config.yaml", ".lock", "env.json", "run.log", "seals.jsonl", "metrics.jsonl", "rollouts.jsonl", DONE}
INSIDE = ("evals", "checkpoints")  # of a run


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


def statuses(folders: list[Path]) -> list[Status]:
    """The status of each run below `folders`, and of those that a sweep which goes on there has yet to start."""
    runs = {run for folder in folders for run in runs_below(folder)}
    known = {run.absolute() for run in runs}
    swept = {run: (folder, began) for folder in folders for run, began in going_on(folder).items()}
    coming = [(run, *swept[run]) for run in sorted(swept.keys() - known) if not is_finished(run)]
    queue = cache(own_jobs)  # Slurm is asked once, and only if a run seems to be queued
    return [
        *(status_of(run, swept.get(run.absolute(), (None, None))[1], queue) for run in sorted(runs)),
        *(status_of(below(run, folder), began, queue) for run, folder, began in coming),
    ]


def below(run: Path, folder: Path) -> Path:
    """An absolute path as seen from where `folder` is seen from."""
    return folder / run.relative_to(folder.absolute()) if run.is_relative_to(folder.absolute()) else run


def runs_below(folder: Path) -> Iterator[Path]:
    """The runs in a folder: of a file of RECORDS alone another program may be the author. What lies in a run is none:
    Hydra's record of it, another evaluation of it, or a mirror's files."""
    for place, folders, files in os.walk(folder):
        found = len(RECORDS & {*files}) > 1 or "job.json" in files
        if found:
            yield Path(place)
        folders[:] = [name for name in folders if not found and not name.startswith(".") and name not in INSIDE]


def status_of(run: Path, swept: float | None, queue: Callable[[], Container[str] | None]) -> Status:
    """The status of a run; `swept` is when a sweep that goes on and has it in its list began, in unix seconds.

    That sweep will start it, unless it did and the run was killed. `queue` gives the jobs that Slurm has; None if it
    does not answer.
    """
    state, note = state_of(run)
    if state == "queued" and is_gone(run / "job.json", queue):
        state, note = "unfinished", f"job {job_in(run / 'job.json').get('job')} left the queue before it began"
    if swept is not None and state == "unfinished" and not written_after(swept, run / "run.log"):
        state = "waiting"
    steps, records = None, tail(run)
    to_begin = swept is not None or (run / "job.json").exists()
    try:
        steps = None if to_begin and not (run / "config.yaml").exists() else total_steps(run)
    except ConfigError as error:
        state, note = ("damaged", note or str(error)) if state in ENDED else (state, f"{note}  {error}")
    return Status(run, state, latest_step(records), steps, pace_of(records), note)


def written_after(time_s: float, file: Path) -> bool:
    return file.exists() and file.stat().st_mtime > time_s


def state_of(run: Path) -> tuple[str, str]:
    """The state of a run, and what there is to say about it."""
    with suppress(FileNotFoundError):
        damage = damage_of(run, file_state(run / DONE))
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
def damage_of(run: Path, done: FileState) -> str | None:
    """What is wrong with a run whose done.json is in this state, as the run itself would say; None if it is whole.

    That is looked up once, since files of a finished run are hashed for it, or read where it has no checksums.
    """
    try:
        refuse_damaged(run)
        if not vouched_seals(run):
            require_readable(run)
    except ConfigError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or run}: {error.strerror or error}. {REMEDY}"
    return None


def require_readable(run: Path) -> None:
    """Raise ConfigError if what a finished run says of itself, its lines or its answers cannot be read."""
    require_config(str(run / "config.yaml"), read_config(run / "config.yaml"), REMEDY)
    require_kinds(str(run / DONE), read_object(run / DONE, REMEDY), RESULT, REMEDY)
    if (run / "env.json").is_file():
        require_environment(str(run / "env.json"), read_object(run / "env.json", REMEDY), REMEDY)
    for number, line in enumerate((run / "metrics.jsonl").read_bytes().splitlines(), start=1):
        require(record_of(line) is not None, f"{run / 'metrics.jsonl'}, line {number}: not a record. {REMEDY}")
    if (run / "samples.parquet").is_file():
        read_table(run / "samples.parquet", ["correct"])


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
    from qerl_core.sweeps.slurm_queue import NoAnswer, read_queue  # which takes half a second to import

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
