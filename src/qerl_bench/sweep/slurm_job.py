"""A run as a job of Slurm, with what submitit calls when the walltime is nearly over."""

# pyright: reportMissingImports=false

import os
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from qerl_bench.sweep.job import Job
from qerl_core.process.failure import reason_of, size_of

JOB_FILE = "job.json"  # in a run's folder: the job that runs it


@dataclass(kw_only=True)
class SlurmJob(Job):
    """What submitit pickles, calls in a job, and has checkpointed when the walltime is nearly over."""

    timeout_min: int
    save_within_s: float

    def __call__(self) -> None:
        folder = self.cwd / self.run_dir
        before = size_of(folder / "run.log")
        code = self.run()
        if code not in (0, os.EX_TEMPFAIL) and size_of(folder / "run.log") == before:
            self.refuse(reason_of(folder, code, before))  # which `qerl-bench status` would take to be queued still
        if code != 0:
            sys.exit(128 - code if code < 0 else code)

    def checkpoint(self) -> Any:
        """What submitit puts back into the queue; None, and a reason in run.log, for a run that would never end."""
        from submitit.helpers import DelayedSubmission

        began = self.began_at
        if not self.save(self.save_within_s):
            self.refuse(
                f"the walltime of {self.timeout_min} min was over before a checkpoint behind step {max(0, began)} was "
                "saved: raise hydra.launcher.timeout_min or signal_s, so that a step and a checkpoint fit in"
            )
            return None
        with suppress(FileNotFoundError):
            os.utime(self.cwd / self.run_dir / JOB_FILE)  # newer than run.log: the run is queued again
        return DelayedSubmission(replace(self))  # without its process, which cannot be pickled
