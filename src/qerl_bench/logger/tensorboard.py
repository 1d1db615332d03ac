"""logger=tensorboard: a mirror of metrics.jsonl as TensorBoard's event files, in the run's folder.

`tensorboard --logdir runs` shows all runs below a folder. A continued run writes the file anew from the local record,
so that each step stands there once. Left out: the time of the steps before, which is then that of writing.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from qerl_bench.logger.base import NAMES, MetricsMirror, ServiceMirror
from qerl_core.checks import check_fields, one_of, optional, require_package

FOLDER = "tensorboard"  # in the run's
FLUSH_S = 10  # seconds until a step can be seen


@dataclass(frozen=True, kw_only=True)
class TensorBoard:
    """Event files with the metrics of metrics.jsonl, and the config as text."""

    name: str
    names: str | None

    def __post_init__(self) -> None:
        check_fields(self, "logger", names=optional(one_of(*NAMES)))

    def check(self) -> None:
        require_package("tensorboard", "logger=tensorboard", "tensorboard")

    def mirror(self, run_dir: Path, records: list[dict[str, Any]], config: dict[str, Any]) -> MetricsMirror:
        return TensorBoardMirror(self, run_dir, records, config)


class TensorBoardMirror(ServiceMirror):
    """A writer of event files. What a record has no number for, null or text, is left out."""

    def begin(self, spec: TensorBoard, run_dir: Path, known: str | None, config: dict[str, Any]) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(run_dir / FOLDER, ignore_errors=True)
        writer = SummaryWriter(str(run_dir / FOLDER), flush_secs=FLUSH_S)
        writer.add_text("config", "".join(f"    {line}\n" for line in OmegaConf.to_yaml(config).splitlines()), 0)
        return writer

    def send(self, run: Any, kind: str, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if isinstance(value, int | float):  # NaN too, which TensorBoard shows as such
                run.add_scalar(name, value, step)

    def end(self, run: Any, failed: bool) -> None:
        run.close()
