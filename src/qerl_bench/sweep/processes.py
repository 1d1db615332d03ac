"""A sweep on this machine: one process per run, one run per device slot, finished runs skipped.

Hydra's stock launchers share a process between runs, or start all at once on the same GPU; memory figures and failures
then leak from one run into the next. Every point is composed and checked before the first one starts. Runs end with
the sweep. A point that another process is running is left to it, and waited for at the end. Points that ran out of
memory where several shared it are run once more when all others have ended, one on a GPU or one in all.
"""

import logging
import os
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import NamedTuple

from qerl_bench.sweep.launcher import unfinished
from qerl_bench.sweep.loaded_parent import Fork, Preloaded
from qerl_core.process.children import Child, signal_of, stop
from qerl_core.process.failure import reason_of, size_of
from qerl_core.process.gpu_share import ALLOCATOR, RUNS_ON_GPU, neighbours, of_allocator, runs_on_gpu
from qerl_core.process.installation import run_command
from qerl_core.process.out_of_memory import NO_MEMORY
from qerl_core.process.progress import duration, phase
from qerl_core.rundir.checkpoints import is_finished
from qerl_core.rundir.locks import TELL_EVERY_S, WAIT_LIMIT_S, holder
from qerl_core.rundir.refusals import CODE as REFUSED
from qerl_core.rundir.refusals import discard
from qerl_core.rundir.stops import note_at_stop, saved_step
from qerl_core.sweeps.pace import Pace, counts, run_left, share_done, share_to_make, time_left
from qerl_core.sweeps.points import Point

log = logging.getLogger(__name__)
POLL_S = 0.1
LOOK_S = 1.0  # between two looks at how far the runs are


class Started(NamedTuple):
    point: Point
    child: Child | Fork
    log_size: int  # of run.log before
    new: bool  # without a folder before
    share: float  # of a whole run, which it takes; below 1 if it continues from a checkpoint
    since: float  # time.monotonic()


class Sweep:
    """Runs those of `points` that are not finished, `slots` at a time. Each slot has one of the `gpus`, if any.

    With `preload` runs are forks of a process that imports once, if there are several.
    """

    def __init__(self, points: Sequence[Point], slots: int, gpus: list[str], preload: bool = False) -> None:
        self.todo = deque(unfinished(points))
        self.slots, self.gpus = slots, gpus
        self.preloaded = Preloaded() if preload and len(self.todo) > 1 else None
        self.alone = False  # whether these are runs that are repeated, each alone on its device
        self.running: dict[int, Started] = {}
        self.elsewhere: deque[Point] = deque()  # points that another process is running
        self.failed: list[tuple[Point, str]] = []
        self.side_by_side = slots > 1  # a single run has the terminal
        self.total, self.done = len(points), len(points) - len(self.todo)
        self.took: list[float] = []  # seconds of the runs that this sweep has made from beginning to end

    def run(self) -> list[tuple[Point, str]]:
        """The failed points, each with the reason in one line."""
        with self.preloaded or nullcontext(), note_at_stop(self.stop_line):
            try:
                self.run_all()
            except BaseException as error:
                self.stop(error)
                raise
        return self.failed

    def run_all(self) -> None:
        told = -LOOK_S
        with phase("sweep") if self.side_by_side else nullcontext() as shown:
            while self.todo or self.running or self.elsewhere or self.repeats():
                for slot in range(self.slots):
                    if slot not in self.running:
                        self.fill(slot)
                if not self.running and self.elsewhere:
                    self.await_other(self.elsewhere.popleft())
                time.sleep(POLL_S)
                self.collect()
                if shown and time.monotonic() - told > LOOK_S:
                    shown.label, told = self.state(), time.monotonic()
            if shown:
                shown.label = self.state()

    def stop_line(self) -> str:
        """What a stop leaves of this sweep, whose runs have ended."""
        of_runs = [f"{one.point.name}: {saved_step(one.point.run_dir)} is saved" for one in self.running.values()]
        done = f"{self.done} of {self.total} runs are done"
        return f"stopped; {'; '.join([done, *of_runs])}; the same command goes on"

    def state(self) -> str:
        """Points done, running and failed, and about how long it will take."""
        running = [one.point.run_dir for one in self.running.values()]
        todo = self.to_start()
        left = time_left(self.paces(), self.took, todo, self.slots) if self.running or todo else None
        return counts(self.total, self.done, [*map(share_done, running)], len(self.failed), left)

    def paces(self) -> list[Pace]:
        now = time.monotonic()
        return [Pace(now - one.since, run_left(one.point.run_dir), one.share) for one in self.running.values()]

    def to_start(self) -> list[float]:
        """The share of a run that each point has to make that has yet to start."""
        return [share_to_make(point.run_dir) for point in self.todo]

    def fill(self, slot: int) -> None:
        """Start the next point that no other process is running."""
        while self.todo:
            point = self.todo.popleft()
            if is_finished(point.run_dir):
                self.done += 1
                log.info("done   %s, by another process", point.name)
            elif who := holder(point.run_dir / ".lock"):
                log.info("%s is running in %s; waiting for it at the end", point.name, who)
                self.elsewhere.append(point)
            else:
                log_size, new = size_of(point.run_dir / "run.log"), not point.run_dir.exists()
                share = share_to_make(point.run_dir)
                left = max(1, self.total - self.done)
                environment = environment_of(slot, self.slots, self.gpus, left, self.alone)
                child = start(point, environment, self.side_by_side, self.preloaded)
                self.running[slot] = Started(point, child, log_size, new, share, time.monotonic())
                return

    def collect(self) -> None:
        """Take note of the runs that have ended."""
        for slot, (point, child, log_size, new, share, since) in list(self.running.items()):
            code = child.poll()
            if code is None:
                continue
            del self.running[slot]
            if code == os.EX_TEMPFAIL:  # another process was faster
                self.todo.appendleft(point)
                continue
            if code == 0:
                self.done += 1
                self.took += [] if share < 1 else [time.monotonic() - since]
                log.info("done   %s in %s", point.name, duration(time.monotonic() - since))
            else:
                reason = reason_of(point.run_dir, code, log_size)
                self.failed.append((point, reason))
                log.info("exit %d %s: %s", code, point.name, reason)
                if code == REFUSED and new:
                    discard(point.run_dir)
            log.info("%s", self.state())

    def repeats(self) -> bool:
        """Whether there is more to do: points without memory, once, if they shared it and now need not."""
        alone = max(1, len(self.gpus))
        again = [point for point, reason in self.failed if NO_MEMORY in reason]
        if self.slots <= alone or not again:
            return False
        log.info("no memory was left for %d runs beside others; they are repeated, %d at a time", len(again), alone)
        self.slots, self.alone = alone, True  # so that no point is repeated twice
        self.failed = [(point, reason) for point, reason in self.failed if point not in again]
        self.todo.extend(again)
        return True

    def await_other(self, point: Point) -> None:
        """Wait until the process that runs `point` has ended; if it ended early, the point is to do again.

        The wait is over, and the point failed, if nothing changes in the run's folder for WAIT_LIMIT_S.
        """
        told = time.monotonic()
        while who := holder(point.run_dir / ".lock"):
            if time.time() - last_change(point) > WAIT_LIMIT_S:
                silent = f"running in {who}, which has written nothing for {WAIT_LIMIT_S / 3600:g} hours"
                self.failed.append((point, silent))
                return
            if time.monotonic() - told > TELL_EVERY_S:
                log.info("waiting for %s, running in %s", point.name, who)
                told = time.monotonic()
            time.sleep(POLL_S)
        self.todo.append(point)

    def stop(self, error: BaseException) -> None:
        """Pass the signal behind `error` on to the runs, and wait until they have ended."""
        if not self.running:
            return
        log.info("stopping %d run(s); Ctrl-C stops them at once", len(self.running))
        stop([started.child for started in self.running.values()], signal_of(error))
        for point, child, *_ in self.running.values():
            log.info("exit %s %s", child.poll(), point.name)


def last_change(point: Point) -> float:
    """When a file of the run was last written, in unix seconds. A lease counts not: it says that a process lives."""
    latest = 0.0
    for path in point.run_dir.iterdir():
        with suppress(FileNotFoundError):  # removed meanwhile
            latest = max(latest, 0.0 if ".lease" in path.name else path.stat().st_mtime)
    return latest


def start(
    point: Point, environment: dict[str, str], side_by_side: bool, preloaded: Preloaded | None = None
) -> Child | Fork:
    """Start one run. It talks to this terminal; runs side by side write to launch.log in their folders.

    The folder is made here, so that a run that is refused leaves the reason in it for this process to read.
    """
    command = run_command()
    point.run_dir.mkdir(parents=True, exist_ok=True)
    file = point.run_dir / "launch.log" if side_by_side else None
    if preloaded is not None and (forked := preloaded.start(command, point.overrides, environment, file)) is not None:
        return forked
    command = [*command, *point.overrides]
    if file is None:
        return Child(command, environment)
    with open(file, "ab") as output:
        return Child(command, environment, stdout=output, stderr=subprocess.STDOUT)


def environment_of(
    slot: int, slots: int, gpus: list[str], left: int | None = None, alone: bool = False
) -> dict[str, str]:
    """The variables of a process in one of several slots: its GPU, if there are any, its share of that, and of the
    cores. No more than `left` runs share a GPU, None: there are enough for all slots. A share that was set by hand
    wins, except for a run that is to be `alone`. Where a GPU is shared PyTorch's memory grows in place in all slots, or
    as was set by hand."""
    environment = dict(os.environ)
    if alone:
        environment.pop(RUNS_ON_GPU, None)
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
        environment.setdefault(RUNS_ON_GPU, str(min(neighbours(slot, slots, len(gpus)), left or slots)))
        shared = not alone and (slots > len(gpus) or runs_on_gpu(environment) > 1)
        if shared and of_allocator(environment) is None:
            environment[ALLOCATOR[0]] = "expandable_segments:True"
    if slots > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // slots)))
    return environment
