"""logger=wandb: Weights & Biases as a mirror of metrics.jsonl. docs/wandb.md says how to use it."""

from __future__ import annotations

import logging
import os
import re
import shlex
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from qerl_bench.logger.base import NAMES, MetricsMirror, ServiceMirror, group_of, keep_id, tags_of
from qerl_core.checks import ConfigError, check_fields, one_of, optional, require_package, text

log = logging.getLogger(__name__)
MODES = ("online", "offline", "disabled")
MAX_TAG = 64  # characters, at W&B
NO_ID = re.compile(r"[^\w.-]")  # W&B's ids have none of /\\#?%:
MAX_NAME, TOKEN = 100, 8  # characters of an id: of the run's name, and of what tells runs of one name apart
REMEDY = "Log in with `wandb login`, or use logger.mode=offline, whose files `wandb sync` sends later"
FINISH_LIMIT_S = 300.0  # for the upload at the end; the rest is sent by `wandb sync`


@dataclass(frozen=True, kw_only=True)
class WandB:
    """Mirror a run under its own name, grouped with its other seeds. In a W&B sweep the agent chooses the id.

    `mode` None: as WANDB_MODE and `wandb offline` say, and else online.
    """

    name: str
    project: str
    entity: str | None
    mode: str | None
    names: str | None

    def __post_init__(self) -> None:
        check_fields(
            self,
            "logger",
            project=text,
            entity=optional(text),
            mode=optional(one_of(*MODES)),
            names=optional(one_of(*NAMES)),
        )

    def check(self) -> None:
        """Raise ConfigError without the package, and without a login that W&B accepts if the mode needs one."""
        require_package("wandb", "logger=wandb", "wandb")
        if problem := login_problem(self.mode):
            raise ConfigError(f"logger=wandb cannot start: {problem.rstrip('.')}. {REMEDY}")

    def mirror(self, run_dir: Path, records: list[dict[str, Any]], config: dict[str, Any]) -> MetricsMirror:
        return WandbMirror(self, run_dir, records, config)


@lru_cache
def login_problem(mode: str | None) -> str | None:
    """Why W&B cannot be used in this mode; None if it can, as far as one can know without starting a run."""
    if mode in ("offline", "disabled"):
        return None
    import wandb
    from wandb.errors import AuthenticationError, UsageError

    # With its own mode, because wandb.login would follow WANDB_MODE.
    settings = wandb.setup(wandb.Settings(mode=mode)).settings if mode else wandb.setup().settings  # type: ignore[arg-type]
    if settings.mode not in ("online", "shared"):
        return None
    try:
        return None if wandb.login(prompt=False) else "this machine is not logged in"
    except (AuthenticationError, UsageError) as error:
        return str(error)


class WandbMirror(ServiceMirror):
    """A W&B run with the steps of ours, under its whole name and an id that no other run has. No login is refused."""

    def begin(self, spec: WandB, run_dir: Path, known: str | None, config: dict[str, Any]) -> Any:
        import wandb
        from wandb.errors import AuthenticationError, UsageError

        self.run_dir, name = run_dir, str(config["name"])
        tags = [tag[:MAX_TAG] for tag in tags_of(config)]
        identity: dict[str, str] = {}
        if not os.environ.get("WANDB_SWEEP_ID"):
            fresh = f"{NO_ID.sub('-', name)[:MAX_NAME]}-{uuid4().hex[:TOKEN]}"
            identity = {"id": known or fresh, "resume": "allow"}
            keep_id(run_dir, spec.name, identity["id"])
        try:
            return wandb.init(
                project=spec.project,
                entity=spec.entity,
                name=name,
                group=os.environ.get("WANDB_RUN_GROUP") or group_of(config),
                tags=[*tags, *filter(None, os.environ.get("WANDB_TAGS", "").split(","))],
                dir=str(run_dir),
                mode=spec.mode,  # type: ignore[arg-type]
                config=config,
                settings=wandb.Settings(finish_timeout=FINISH_LIMIT_S),
                **identity,  # type: ignore[arg-type]
            )
        except (AuthenticationError, UsageError) as error:
            raise ConfigError(f"logger=wandb cannot start: {str(error).rstrip('.')}. {REMEDY}") from error

    def send(self, run: Any, kind: str, step: int, metrics: dict[str, float]) -> None:
        if step >= run.starting_step:
            run.log(metrics, step=step)
        if kind == "eval":  # if the run was killed during this evaluation, W&B has closed the step
            run.summary.update(metrics)

    def end(self, run: Any, failed: bool) -> None:
        run.finish(exit_code=int(failed))
        if run.settings.mode == "offline":
            log.info("logger=wandb was offline; where there is a network: %s", upload(self.run_dir))


def upload(run_dir: Path) -> str:
    """The command that sends all attempts of the run in `run_dir` to W&B, in their order."""
    return f"wandb sync {shlex.quote(str(run_dir))}/wandb/offline-run-*"
