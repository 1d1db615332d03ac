"""What all launchers share: every point is checked before the first one starts, finished ones are skipped, failures are
listed with their reasons at the end, and the same command runs these again."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from qerl_bench.sweep.check import check_points, note_following_alpha
from qerl_bench.sweep.table import sweep_table
from qerl_core.checks import Check, ConfigError, require
from qerl_core.options.hydra_options import refuse_unusable
from qerl_core.options.names import search_folders
from qerl_core.options.user_options import search_path
from qerl_core.process.installation import CONF_DIR
from qerl_core.rundir.locks import holder
from qerl_core.sweeps.listing import listed
from qerl_core.sweeps.points import Point, SweepFailed

log = logging.getLogger(__name__)
pairs = Check(lambda value: value is None or isinstance(value, Mapping), "null or names with values, {name: value}")


class SweepLauncher(Launcher):
    """A launcher says how it runs points (`run_points`), and before that what it cannot work with (`check`)."""

    here = True  # whether points run on this machine, so that its GPUs are theirs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        refuse_unusable(config.hydra)
        folders = search_folders(config.hydra.runtime)
        self.search_path = search_path(folder for folder in folders if folder != CONF_DIR)  # Hydra leaves it out
        self.folder = Path(str(config.hydra.sweep.dir))

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        self.check()
        require(
            len(job_overrides) > 0,
            "this sweep has no point: one of its keys has no value, as seed=range(0) has none. Give some: seed=0,1,2",
        )
        words = [[*self.search_path, *overrides] for overrides in job_overrides]
        points = check_points(words, self.here)
        note_following_alpha(words)
        damaged = [(point, point.damage) for point in points if point.damage is not None]
        sound = [point for point in points if point.damage is None]
        todo = len(unfinished(sound))
        broken = f", {len(damaged)} damaged" if damaged else ""
        log.info("sweep of %d runs: %d finished before, %d to do%s", len(points), len(sound) - todo, todo, broken)
        with listed(self.folder, [point.run_dir for point in points]):
            failed = [*damaged, *self.run_points(sound)]
        if begun := [point.run_dir for point in points if (point.run_dir / "config.yaml").exists()]:
            print(sweep_table(begun))
        if failed:
            raise SweepFailed(len(points), failed)
        return [finished_job(overrides) for overrides in job_overrides]

    @abstractmethod
    def check(self) -> None:
        """Raise ConfigError if the launcher's own options cannot work."""

    @abstractmethod
    def run_points(self, points: Sequence[Point]) -> list[tuple[Point, str]]:
        """Run those of `points` that are not finished. The failed ones, with the reason in a line."""


def unfinished(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if not point.finished]


def not_running(todo: Sequence[Point]) -> list[Point]:
    """The points that no other process is running. The others are left to it, and named."""
    free = []
    for point in todo:
        if who := holder(point.run_dir / ".lock"):
            log.info("%s is running in %s; left to it", point.name, who)
        else:
            free.append(point)
    return free


def check_ranks(gpus: float, ranks: int) -> None:
    """Raise ConfigError unless each of the processes of a run gets one of its GPUs."""
    if ranks > 1 and gpus not in (0, ranks):
        raise ConfigError(
            f"hydra.launcher.gpus must be hydra.launcher.ranks, one GPU for each process of a run, got gpus={gpus:g} "
            f"and ranks={ranks}; set both to the same number, or gpus=0 for a run on CPUs"
        )


def finished_job(overrides: Sequence[str]) -> JobReturn:
    job = JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED)
    job.return_value = None
    return job
