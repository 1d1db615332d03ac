"""Hydra's basic sweeper, which leaves the check of the points to the launcher.

Hydra would compose every point in full before the launcher composes and checks it: a fifth of a second for each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override

from qerl_core.options.hydra_options import refuse_unlisted
from qerl_core.rundir.refusals import nothing_left_if_refused
from qerl_core.rundir.run_checks import refuse_unwritable


@dataclass
class UncheckedSweeperConf(BasicSweeperConf):
    _target_: str = "hydra_plugins.process_launcher.sweeper.UncheckedSweeper"


ConfigStore.instance().store(
    group="hydra/sweeper", name="unchecked", node=UncheckedSweeperConf, provider="process_launcher"
)


class UncheckedSweeper(BasicSweeper):
    """All points of the grid, as they are."""

    def sweep(self, arguments: list[str]) -> Any:
        assert self.config is not None
        folder = Path(self.config.hydra.sweep.dir)
        refuse_unwritable(folder, "root=DIR")  # where the grid is written
        with nothing_left_if_refused(folder / "multirun.yaml"):
            return super().sweep(arguments)

    @staticmethod
    def split_arguments(overrides: list[Override], max_batch_size: int | None) -> list[list[list[str]]]:
        refuse_unlisted(overrides)
        return BasicSweeper.split_arguments(overrides, max_batch_size)

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing; `check_points` refuses bad points before the first one starts."""
