"""Follows the jobs of a sweep. Whether a run is done is read from its folder, and whether its job still exists from
squeue; accounting, which many clusters lack, is not asked."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from qerl_core.checks import ConfigError
from qerl_core.process.failure import reason_of, size_of
from qerl_core.rundir.checkpoints import is_finished
from qerl_core.rundir.locks import holder
from qerl_core.sweeps.points import Point

log = logging.getLogger(__name__)
POLL_S = (1.0, 15.0)  # between two looks at the queue: at first, and at most
TELL_EVERY_S = 60.0
GONE_AFTER = 2  # looks at the queue without a job, so that a network file system can show what the job wrote last
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL", "REVOKED", "NODE_FAIL")


class Entry(NamedTuple):
    """A job in the queue."""

    state: str  # PENDING, RUNNING, COMPLETING, ...
    why: str  # the node, or why it is pending


class NoAnswer(ConfigError):
    """squeue failed."""


def read_queue() -> dict[str, Entry]:
    """The user's jobs by id, 12_3 for a task of an array, SQUEUE_* or not. Raises NoAnswer if Slurm does not."""
    command = ["squeue", "--me", "--array", "--noheader", "--states=all", "--format=%i|%T|%R"]
    unfiltered = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    asked = subprocess.run(command, capture_output=True, text=True, env=unfiltered)
    if asked.returncode != 0:
        raise NoAnswer(f"Slurm does not answer ({' '.join(asked.stderr.split())}); when it does, repeat the command")
    rows = [line.split("|", 2) for line in asked.stdout.splitlines()]
    return {job: Entry(state, why) for job, state, why in rows if state not in OVER}


def follow(jobs: dict[str, Point], folder: Path) -> list[tuple[Point, str]]:
    """Wait until no job is left; the points that are not done, each with the reason in one line."""
    left, failed, missing = dict(jobs), [], Counter[str]()
    starts = {job: size_of(point.run_dir / "run.log") for job, point in jobs.items()}
    states: dict[str, str] = {}
    pause, told = POLL_S[0], time.monotonic()
    answers = True
    while left:
        time.sleep(pause)
        pause = min(1.5 * pause, POLL_S[1])
        try:
            queue = read_queue()
        except NoAnswer:
            if answers:
                log.warning("Slurm does not answer. Runs that have begun go on, and this program waits for it")
            answers = False
            continue
        if not answers:
            log.info("Slurm answers again")
            answers = True
        for job, point in list(left.items()):
            state = queue[job].state if job in queue else ""
            if is_finished(point.run_dir):
                log.info("done   %s", point.name)
                del left[job]
            elif job in queue:
                missing[job] = 0
                if state != states.get(job) and state == "RUNNING":
                    log.info("start  %s in %s, job %s", point.name, queue[job].why, job)
                states[job] = state
                continue
            elif missing[job] + 1 < GONE_AFTER:
                missing[job] += 1
                continue
            else:
                if who := holder(point.run_dir / ".lock"):
                    log.info("%s is running in %s; left to it", point.name, who)
                else:
                    reason = why_ended(point, job, starts[job], folder)
                    failed.append((point, reason))
                    log.info("ended  %s: %s", point.name, reason)
                del left[job]
            pause = POLL_S[0]
        if time.monotonic() - told > TELL_EVERY_S and left:
            told = time.monotonic()
            pending = Counter(queue[job].why for job in left if job in queue and queue[job].state == "PENDING")
            waiting = "".join(f", {number} waiting {why}" for why, number in pending.items())
            log.info("%d of %d runs ended%s", len(jobs) - len(left), len(jobs), waiting)
    return failed


def why_ended(point: Point, job: str, log_size: int, folder: Path) -> str:
    """Why a job ended without its run: what Slurm said last, and what the run said."""
    printed = folder / ".slurm" / f"{job}_0_log.err"
    if not printed.exists():
        return f"job {job} left the queue before it began: it was cancelled, or Slurm has lost it"
    lines = printed.read_text(errors="replace").splitlines()
    slurm = [line.partition("error: ")[2].strip(" *") for line in lines if re.match("slurmstepd|srun", line)]
    killed = next((line for line in reversed(slurm) if re.search("CANCELLED|LIMIT|oom|NODE|memory", line)), None)
    said = reason_of(point.run_dir, 0, log_size)
    told = "" if said == "exit code 0" else said
    return "; ".join(filter(None, [told, killed])) or f"job {job} ended without a word; see {printed}"


def what_goes_on(jobs: dict[str, Point], folder: Path) -> str:
    """What jobs go on without this program, and how to see, follow and cancel them."""
    if not jobs:
        return "nothing was submitted"
    cancel = " ".join(arrays(jobs))
    return (
        f"{sum(not is_finished(point.run_dir) for point in jobs.values())} runs go on without this program. The same "
        f"command follows them, qerl-bench status {quote(str(folder))} lists them, scancel {cancel} cancels them"
    )


def arrays(jobs: Iterable[str]) -> list[str]:
    """The job arrays of `jobs`."""
    return list(dict.fromkeys(job.partition("_")[0] for job in jobs))
