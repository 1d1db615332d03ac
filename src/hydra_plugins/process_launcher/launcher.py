"""hydra/launcher=process, the default: every point is a process on this machine."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore

from qerl_bench.checks import count, optional
from qerl_bench.process.gpu_share import visible_gpus
from qerl_bench.sweep.launcher import SweepLauncher
from qerl_bench.sweep.points import Point
from qerl_bench.sweep.sweep import Sweep

log = logging.getLogger(__name__)


@dataclass
class ProcessLauncherConf:
    _target_: str = "hydra_plugins.process_launcher.launcher.ProcessLauncher"
    slots: int | None = None  # runs side by side; null = one per visible GPU, or one on a machine without


ConfigStore.instance().store(
    group="hydra/launcher", name="process", node=ProcessLauncherConf, provider="process_launcher"
)


class ProcessLauncher(SweepLauncher):
    """Start a process for each point of the sweep."""

    def __init__(self, slots: int | None) -> None:
        self.slots = slots

    def check(self) -> None:
        optional(count())("hydra.launcher.slots", self.slots)

    def run_points(self, points: Sequence[Point]) -> list[tuple[Point, str]]:
        gpus = visible_gpus()
        slots = self.slots or max(1, len(gpus))
        log.info("%d at a time", slots)
        return Sweep(points, slots, gpus).run()
