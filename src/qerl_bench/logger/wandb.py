"""logger=wandb: Weights & Biases as a mirror of metrics.jsonl."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from qerl_bench.checks import ConfigError, require, require_package
from qerl_bench.logger.base import Sink
from qerl_bench.logger.jsonl import JsonlSink
from qerl_bench.rundir import RunDir

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WandB:
    """Mirror a run under its own name. In a sweep the agent decides the run's id."""

    name: str
    project: str
    entity: str | None
    mode: str

    def __post_init__(self) -> None:
        require(self.mode in ("online", "offline"), f"logger.mode must be online or offline, got {self.mode!r}")

    def check(self) -> None:
        require_package("wandb", "logger=wandb", "wandb")

    def build(self, run: RunDir, config: dict[str, Any]) -> list[Sink]:
        return [JsonlSink(run), WandbSink(self, run, config)]


class WandbSink:
    """A mirror that is switched off, with a warning, at its first failure.

    Our step is W&B's own. After a kill W&B may hold steps that are repeated now, or lack steps that are not: what the
    local record holds is sent again, and of that the steps that W&B has are left out.
    """

    def __init__(self, spec: WandB, run: RunDir, config: dict[str, Any]) -> None:
        import wandb
        from wandb.errors import Error

        identity = {} if os.environ.get("WANDB_SWEEP_ID") else {"id": run.path.name, "resume": "allow"}
        try:
            self.mirror = wandb.init(
                project=spec.project,
                entity=spec.entity,
                name=run.path.name,
                dir=str(run.path),
                mode=spec.mode,  # type: ignore[arg-type]
                config=config,
                **identity,  # type: ignore[arg-type]
            )
        except Error as error:
            raise ConfigError(
                f"logger=wandb cannot start: {str(error).rstrip('.')}. Log in with `wandb login`, or use "
                "logger.mode=offline"
            ) from error
        for record in run.metrics():
            metrics = {key: value for key, value in record.items() if key not in ("kind", "step", "time")}
            self.log(record["kind"], record["step"], metrics)

    def log(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        if self.mirror is None:
            return
        try:
            if step >= self.mirror.starting_step:
                self.mirror.log(metrics, step=step)
            if kind == "eval":  # the last step may have been closed by a kill during its evaluation
                self.mirror.summary.update(metrics)
        except Exception as error:  # a mirror may break in any way; the run and its local record go on
            log.warning("logger=wandb failed at step %d and is off from here on: %s", step, error)
            self.mirror = None

    def close(self, failed: bool) -> None:
        if self.mirror is None:
            return
        try:
            self.mirror.finish(exit_code=int(failed))
        except Exception as error:  # as in `log`
            log.warning("logger=wandb failed at its end: %s", error)
