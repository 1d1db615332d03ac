"""The default sweep launcher: one process per run, one run per device slot, finished runs skipped.

Hydra's stock launchers share a process between runs, or start all at once on the same GPU; memory figures and failures
then leak from one run into the next. Every point is composed and checked before the first one starts. Runs end with
the launcher. A point that another process is running is left to it, and waited for at the end.
"""

import logging
import os
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from qerl_bench.checks import count, optional
from qerl_bench.children import Child, signal_of, stop
from qerl_bench.cli import Point, SweepFailed, check_points
from qerl_bench.config import refuse_env_copy
from qerl_bench.failure import reason_of
from qerl_bench.installation import run_command
from qerl_bench.locks import TELL_EVERY_S, WAIT_LIMIT_S, holder
from qerl_bench.rundir import is_finished

log = logging.getLogger(__name__)
POLL_S = 0.1


@dataclass
class ProcessLauncherConf:
    _target_: str = "hydra_plugins.process_launcher.launcher.ProcessLauncher"
    slots: int | None = None  # runs side by side; null = one per visible GPU, or one on a machine without


ConfigStore.instance().store(
    group="hydra/launcher", name="process", node=ProcessLauncherConf, provider="process_launcher"
)


class ProcessLauncher(Launcher):
    """Start a process for each point of the sweep."""

    def __init__(self, slots: int | None) -> None:
        self.slots = slots

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        refuse_env_copy(config.hydra.job)
        self.search_path = search_path(config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        optional(count())("hydra.launcher.slots", self.slots)
        gpus = visible_gpus()
        slots = self.slots or max(1, len(gpus))
        points = check_points([[*self.search_path, *overrides] for overrides in job_overrides])
        todo = [point for point in points if not point.finished]
        done = len(points) - len(todo)
        log.info("sweep of %d runs: %d finished before, %d to do, %d at a time", len(points), done, len(todo), slots)
        failed = Sweep(todo, slots, gpus).run()
        if failed:
            raise SweepFailed(len(points), failed)
        return [finished_job(overrides) for overrides in job_overrides]


class Started(NamedTuple):
    point: Point
    child: Child
    log_size: int  # of run.log before


class Sweep:
    """Runs the points `todo`, `slots` at a time. Each slot has one of the `gpus`, if there are any."""

    def __init__(self, todo: Sequence[Point], slots: int, gpus: list[str]) -> None:
        self.todo = deque(todo)
        self.slots, self.gpus = slots, gpus
        self.running: dict[int, Started] = {}
        self.elsewhere: deque[Point] = deque()  # points that another process is running
        self.failed: list[tuple[Point, str]] = []

    def run(self) -> list[tuple[Point, str]]:
        """The failed points, each with the reason in one line."""
        try:
            while self.todo or self.running or self.elsewhere:
                for slot in range(self.slots):
                    if slot not in self.running:
                        self.fill(slot)
                if not self.running and self.elsewhere:
                    self.await_other(self.elsewhere.popleft())
                time.sleep(POLL_S)
                self.collect()
        except BaseException as error:
            self.stop(error)
            raise
        return self.failed

    def fill(self, slot: int) -> None:
        """Start the next point that no other process is running."""
        while self.todo:
            point = self.todo.popleft()
            if is_finished(point.run_dir):
                log.info("done   %s, by another process", point.name)
            elif who := holder(point.run_dir / ".lock"):
                log.info("%s is running in %s; waiting for it at the end", point.name, who)
                self.elsewhere.append(point)
            else:
                log_size = size_of(point.run_dir / "run.log")
                self.running[slot] = Started(point, start(point, slot, self.slots, self.gpus), log_size)
                return

    def collect(self) -> None:
        """Take note of the runs that have ended."""
        for slot, (point, child, log_size) in list(self.running.items()):
            code = child.poll()
            if code is None:
                continue
            del self.running[slot]
            if code == os.EX_TEMPFAIL:  # another process was faster
                self.todo.appendleft(point)
            elif code == 0:
                log.info("done   %s", point.name)
            else:
                reason = reason_of(point.run_dir, code, log_size)
                self.failed.append((point, reason))
                log.info("exit %d %s: %s", code, point.name, reason)

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
        log.info("stopping %d runs; Ctrl-C stops them at once", len(self.running))
        stop([started.child for started in self.running.values()], signal_of(error))
        for point, child, _ in self.running.values():
            log.info("exit %s %s", child.poll(), point.name)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def last_change(point: Point) -> float:
    """When a file of the run was last written, in unix seconds."""
    return max(path.stat().st_mtime for path in point.run_dir.iterdir())


def search_path(config: DictConfig) -> list[str]:
    """The override that adds the user's own folders of options, which Hydra leaves out of the points; none without."""
    places = [
        f"'{source.schema}://{source.path}'"
        for source in config.hydra.runtime.config_sources
        if source.provider not in ("hydra", "main", "schema")
    ]
    return [f"hydra.searchpath=[{','.join(places)}]"] if places else []


def start(point: Point, slot: int, slots: int, gpus: list[str]) -> Child:
    """Start one run. Alone it talks to this terminal; runs side by side write to launch.log in their folders."""
    environment = environment_of(slot, slots, gpus)
    command = [*run_command(), *point.overrides]
    if slots == 1:
        return Child(command, environment)
    point.run_dir.mkdir(parents=True, exist_ok=True)
    with open(point.run_dir / "launch.log", "ab") as output:
        return Child(command, environment, stdout=output, stderr=subprocess.STDOUT)


def environment_of(slot: int, slots: int, gpus: list[str]) -> dict[str, str]:
    """The variables of a process in one of several slots: its GPU, if there are any, and its share of the cores."""
    environment = dict(os.environ)
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    if slots > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // slots)))
    return environment


def visible_gpus() -> list[str]:
    """Ids of the GPUs that runs may use, found without torch: CUDA_VISIBLE_DEVICES, or else what nvidia-smi lists."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu for gpu in chosen.split(",") if gpu.strip()]
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return []
    return listed.stdout.split() if listed.returncode == 0 else []


def finished_job(overrides: Sequence[str]) -> JobReturn:
    job = JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED)
    job.return_value = None
    return job
