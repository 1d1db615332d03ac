"""logger=wandb: Weights & Biases as a mirror of metrics.jsonl."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl_bench.checks import ConfigError, check_fields, one_of, optional, require_package, text
from qerl_bench.logger.base import MetricsMirror

log = logging.getLogger(__name__)
FINISH_LIMIT_S = 300.0  # for the upload at the end; the rest is sent by `wandb sync`


@dataclass(frozen=True, kw_only=True)
class WandB:
    """Mirror a run under its own name. In a W&B sweep the agent chooses the id."""

    name: str
    project: str
    entity: str | None
    mode: str

    def __post_init__(self) -> None:
        check_fields(self, "logger", project=text, entity=optional(text), mode=one_of("online", "offline"))

    def check(self) -> None:
        require_package("wandb", "logger=wandb", "wandb")

    def mirror(self, run_dir: Path, records: list[dict[str, Any]], config: dict[str, Any]) -> MetricsMirror:
        return WandbMirror(self, run_dir, records, config)


class WandbMirror(MetricsMirror):
    """A W&B run with the steps of ours. At its first failure it warns and switches itself off; no login is refused.

    After a kill, W&B may hold steps that the resumed run repeats, or lack steps that the resumed run keeps. So all
    local records are sent again at the start, except for the steps that W&B has.
    """

    def __init__(self, spec: WandB, run_dir: Path, records: list[dict[str, Any]], config: dict[str, Any]) -> None:
        import wandb
        from wandb.errors import AuthenticationError, UsageError

        identity = {} if os.environ.get("WANDB_SWEEP_ID") else {"id": run_dir.name, "resume": "allow"}
        try:
            self.run = wandb.init(
                project=spec.project,
                entity=spec.entity,
                name=run_dir.name,
                dir=str(run_dir),
                mode=spec.mode,  # type: ignore[arg-type]
                config=config,
                settings=wandb.Settings(finish_timeout=FINISH_LIMIT_S),
                **identity,  # type: ignore[arg-type]
            )
        except (AuthenticationError, UsageError) as error:
            raise ConfigError(
                f"logger=wandb cannot start: {str(error).rstrip('.')}. Log in with `wandb login`, or use "
                "logger.mode=offline"
            ) from error
        except Exception as error:  # no server, no room on its disk; as in `log`
            log.warning("logger=wandb cannot start and is off; metrics.jsonl has everything: %s", error)
            self.run = None
        for record in records:
            metrics = {key: value for key, value in record.items() if key not in ("kind", "step", "time")}
            self.log(record["kind"], record["step"], metrics)

    def log(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        if self.run is None:
            return
        try:
            if step >= self.run.starting_step:
                self.run.log(metrics, step=step)
            if kind == "eval":  # if the run was killed during this evaluation, W&B has closed the step
                self.run.summary.update(metrics)
        except Exception as error:  # a mirror may break in any way; the run goes on
            log.warning("logger=wandb failed at step %d and is off from here on: %s", step, error)
            self.run = None

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if self.run is None:
            return
        try:
            self.run.finish(exit_code=int(kind is not None))
        except Exception as failure:  # as in `log`
            log.warning("logger=wandb failed at its end: %s", failure)
