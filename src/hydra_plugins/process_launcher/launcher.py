"""The default sweep launcher: one process per run, one run per device slot, finished runs skipped.

Hydra's stock launchers share a process between runs, or start all at once on the same GPU; memory figures and failures
then leak from one run into the next. Every point is composed and checked before the first one starts.
"""

import logging
import os
import queue
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from qerl_bench.cli import Point, SweepFailed, check_points
from qerl_bench.installation import run_command

log = logging.getLogger(__name__)


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
        self.search_path = search_path(config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        gpus = visible_gpus()
        slots = self.slots or max(1, len(gpus))
        points = check_points([[*self.search_path, *overrides] for overrides in job_overrides])
        todo = [point for point in points if not point.finished]
        log.info(
            "sweep of %d runs: %d finished before, %d to do, %d at a time",
            len(points),
            len(points) - len(todo),
            len(todo),
            slots,
        )
        free: queue.Queue[int] = queue.Queue()
        for slot in range(slots):
            free.put(slot)
        processes: set[subprocess.Popen[bytes]] = set()
        stopping = threading.Event()

        def run_in_slot(point: Point) -> int:
            slot = free.get()
            try:
                if stopping.is_set():
                    return 130
                process = start(point, slot, slots, gpus)
                processes.add(process)
                code = process.wait()
                processes.discard(process)
                log.info("%s %s", "done  " if code == 0 else f"exit {code}", point.name)
                return code
            finally:
                free.put(slot)

        with ThreadPoolExecutor(slots) as pool:
            try:
                codes = list(pool.map(run_in_slot, todo))
            except BaseException:
                stopping.set()
                for process in list(processes):
                    process.terminate()
                raise
        failed = [point for point, code in zip(todo, codes, strict=True) if code != 0]
        if failed:
            raise SweepFailed(len(points), failed)
        return [finished_job(overrides) for overrides in job_overrides]


def search_path(config: DictConfig) -> list[str]:
    """The override that adds the user's own folders of options, which Hydra leaves out of the points; none without."""
    places = [
        f"'{source.schema}://{source.path}'"
        for source in config.hydra.runtime.config_sources
        if source.provider not in ("hydra", "main", "schema")
    ]
    return [f"hydra.searchpath=[{','.join(places)}]"] if places else []


def start(point: Point, slot: int, slots: int, gpus: list[str]) -> subprocess.Popen[bytes]:
    """Start one run. Alone it talks to this terminal; runs side by side write to launch.log in their folders."""
    environment = dict(os.environ)
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    if slots > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // slots)))
    command = [*run_command(), *point.overrides]
    if slots == 1:
        return subprocess.Popen(command, env=environment)
    point.run_dir.mkdir(parents=True, exist_ok=True)
    with open(point.run_dir / "launch.log", "ab") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


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
