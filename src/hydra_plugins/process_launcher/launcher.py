"""hydra/launcher=process, the default: every point is a process on this machine."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore

from qerl_bench.estimate.words import log_sweep_estimate
from qerl_bench.sweep.launcher import SweepLauncher
from qerl_bench.sweep.loaded_parent import forks_runs
from qerl_bench.sweep.processes import Sweep
from qerl_core.checks import count, flag, optional
from qerl_core.process.cards import visible_gpus
from qerl_core.process.mps import side_by_side
from qerl_core.sweeps.points import Point

log = logging.getLogger(__name__)


@dataclass
class ProcessLauncherConf:
    _target_: str = "hydra_plugins.process_launcher.launcher.ProcessLauncher"
    slots: int | None = None  # runs side by side; null = one per visible GPU, or one on a machine without
    mps: bool = False  # with NVIDIA's Multi-Process Service, for several slots a GPU: their kernels run side by side
    preload: bool | None = None  # fork runs from one process that imports once; null = on Linux without a GPU


ConfigStore.instance().store(
    group="hydra/launcher", name="process", node=ProcessLauncherConf, provider="process_launcher"
)


class ProcessLauncher(SweepLauncher):
    """Start a process for each point of the sweep."""

    def __init__(self, slots: int | None, mps: bool, preload: bool | None = None) -> None:
        self.slots, self.mps, self.preload = slots, mps, preload

    def check(self) -> None:
        optional(count())("hydra.launcher.slots", self.slots)
        flag("hydra.launcher.mps", self.mps)
        optional(flag)("hydra.launcher.preload", self.preload)
        forks_runs(self.preload, [])

    def run_points(self, points: Sequence[Point]) -> list[tuple[Point, str]]:
        gpus = visible_gpus()
        slots = self.slots or max(1, len(gpus))
        log.info("%d at a time", slots)
        log_sweep_estimate([point.overrides for point in points if not point.finished], slots, len(gpus))
        with side_by_side(self.mps):
            return Sweep(points, slots, gpus, forks_runs(self.preload, gpus)).run()
