"""One point of a sweep as a node of a cluster runs it: a process that is told before its time is over, and continued.

Schedulers pickle a `Job`, so this module imports nothing heavy, and nothing of any scheduler.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from qerl_core.process.children import Child, stop
from qerl_core.process.failure import MARK
from qerl_core.process.installation import run_command
from qerl_core.rundir.checkpoints import is_finished, last_checkpoint, step_of
from qerl_core.rundir.lease import BEAT_S, STALE_S

POLL_S = 0.2
TIME_IS_UP = signal.SIGUSR2  # what Slurm sends through submitit, to all processes of a job


@dataclass(kw_only=True)
class Job:
    """The run of `overrides` in `run_dir`, both as seen from the folder `cwd`."""

    overrides: list[str]
    run_dir: Path
    cwd: Path
    ranks: int = 1  # processes of the run, started by torchrun if more than one
    _child: Child | None = field(default=None, init=False, repr=False)
    began_at: int = field(default=-1, init=False)  # the step that this attempt continues from; -1 = the start

    def run(self) -> int:
        """The exit code of the run, -N if signal N killed it; EX_TEMPFAIL if another process is running it.

        A run of this sweep whose node was lost seems to run until its lease is stale; that is waited for.
        """
        folder = self.cwd / self.run_dir
        folder.mkdir(parents=True, exist_ok=True)
        limit = time.monotonic() + STALE_S + 2 * BEAT_S
        self.began_at = saved_step(folder)
        while (code := self._attempt(folder)) == os.EX_TEMPFAIL and time.monotonic() < limit:
            time.sleep(BEAT_S / 2)
            if is_finished(folder):
                return 0
        return code

    def _attempt(self, folder: Path) -> int:
        threads = os.environ.get("SLURM_CPUS_PER_TASK", "1")
        print(f"{folder.name} in {platform.node()}", flush=True)
        with open(folder / "launch.log", "ab") as output:
            self._child = Child(
                [*run_command(self.ranks), *self.overrides],
                {"OMP_NUM_THREADS": threads, **os.environ},
                cwd=self.cwd,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=partial(signal.signal, TIME_IS_UP, signal.SIG_IGN),
            )
        try:
            while (code := self._child.poll()) is None:
                time.sleep(POLL_S)
        except BaseException:
            stop([self._child], signal.SIGTERM)
            raise
        return code

    def save(self, limit_s: float) -> bool:
        """Have the run save a checkpoint and end, within `limit_s`. Whether it is further than when it began."""
        if self._child is not None:
            stop([self._child], signal.SIGTERM, limit_s)
        folder = self.cwd / self.run_dir
        return is_finished(folder) or saved_step(folder) > self.began_at

    def refuse(self, reason: str) -> None:
        """Write to run.log why this run is not continued, where a sweep reads it."""
        with open(self.cwd / self.run_dir / "run.log", "a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {MARK}{reason}\n")


def saved_step(folder: Path) -> int:
    """The step of the last checkpoint; -1 without one."""
    checkpoint = last_checkpoint(folder)
    return -1 if checkpoint is None else step_of(checkpoint)
