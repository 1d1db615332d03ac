"""The base weights of model=tiny: an ordinary supervised run of this harness, done once and shared by every arm."""

from __future__ import annotations

import fcntl
import logging
import subprocess
import sys
from pathlib import Path

from qerl_bench.config import CONF_DIR, build, compose
from qerl_bench.model.base import Model
from qerl_bench.rundir import is_finished, last_checkpoint
from qerl_bench.task.base import Task

log = logging.getLogger(__name__)


def base_checkpoint(model: Model, task: Task, root: str) -> Path | None:
    """The checkpoint folder of the model's warm start, made now if the cache lacks it; None if the model needs none.

    The run lives in `root`/cache/runs under its own fingerprint. Of several processes that need it at once, one makes
    it and the others wait.
    """
    overrides = model.warm_start_overrides()
    if overrides is None:
        return None
    overrides = [*overrides, *task.warm_start_overrides(), f"root={Path(root) / 'cache'}"]
    run_dir = build(compose(overrides)).run_dir
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with open(run_dir.parent / f".{run_dir.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_finished(run_dir):
            log.info("warm start of model=%s: once, then kept in %s", model.name, run_dir)
            subprocess.run([sys.executable, str(CONF_DIR.parent / "src" / "run.py"), *overrides], check=True)
    checkpoint = last_checkpoint(run_dir)
    assert checkpoint is not None, f"{run_dir} is finished but has no checkpoint"
    return checkpoint / "model"
