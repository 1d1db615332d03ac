"""A sweep on a Slurm cluster: every point is a task of a Slurm job array, submitted by submitit.

The jobs go on without this program. The same command follows those that exist, and submits again what is neither
finished, nor running, nor in the queue.
"""

# pyright: reportMissingImports=false

import json
import logging
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qerl_bench.sweep.launcher import SweepLauncher, check_ranks, not_running, pairs, unfinished
from qerl_bench.sweep.slurm_environment import submission_environment
from qerl_bench.sweep.slurm_job import JOB_FILE, SlurmJob
from qerl_core.checks import ConfigError, count, flag, number, optional, require, require_package, text
from qerl_core.process.termination import Terminated
from qerl_core.rundir.durable import write_atomically
from qerl_core.rundir.read_files import read_object
from qerl_core.sweeps.points import Point
from qerl_core.sweeps.slurm_queue import arrays, follow, read_queue, what_goes_on

log = logging.getLogger(__name__)


@dataclass
class SlurmOptions:
    partition: str | None = None  # null = the cluster's default, as for the next three
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None  # features of a node, such as the type of its GPU
    gpus: int = 1  # of each run
    ranks: int = 1  # processes of each run, started by torchrun if more than one; then gpus must be ranks or 0
    cpus: int = 8  # cores of each run
    mem_gb: float | None = None  # memory of each run; null = the cluster's default
    timeout_min: int = 240  # walltime of one attempt, minutes
    signal_s: int = 300  # so many seconds before its end a run is told to save a checkpoint after its step
    max_requeues: int = 20  # times that a run whose walltime is over goes on in a new attempt
    array_parallelism: int | None = None  # runs at a time; null = all
    array_size: int | None = None  # runs in a job array; null = the cluster's MaxArraySize
    setup: list[str] = field(default_factory=list)  # shell lines before each run, such as module load cuda
    python: str | None = None  # what starts Python: apptainer exec --nv FILE python; null = this one
    additional: Any = None  # other options of sbatch: {reservation: x}; no typed dict, which Hydra adds no keys to
    wait: bool = True  # false: submit, and end
    dry_run: bool = False  # true: print what would be submitted


class SlurmSweep(SweepLauncher):
    """Submit the points as job arrays, and follow them."""

    here = False

    def __init__(self, **options: Any) -> None:
        self.conf = SlurmOptions(**options)

    def check(self) -> None:
        conf = self.conf
        checks = {
            **dict.fromkeys(("partition", "account", "qos", "constraint", "python"), optional(text)),
            **dict.fromkeys(("ranks", "cpus", "timeout_min", "signal_s"), count()),
            **dict.fromkeys(("gpus", "max_requeues"), count(0)),
            **dict.fromkeys(("array_parallelism", "array_size"), optional(count())),
            **dict.fromkeys(("wait", "dry_run"), flag),
            "mem_gb": optional(number(above=0)),
            "additional": pairs,
        }
        for name, check in checks.items():
            check(f"hydra.launcher.{name}", getattr(conf, name))
        check_ranks(conf.gpus, conf.ranks)
        require(
            conf.signal_s < 60 * conf.timeout_min,
            f"hydra.launcher.signal_s must be below the walltime of {60 * conf.timeout_min} s, got {conf.signal_s}; it "
            "is the time that a run has to end its step and save; raise hydra.launcher.timeout_min or lower it",
        )
        require_package("submitit", "hydra/launcher=slurm", "slurm")
        for program in ("sbatch", "srun", "squeue", "scancel"):
            require(
                shutil.which(program) is not None,
                f"hydra/launcher=slurm needs a Slurm cluster, but there is no {program} here: use a login node, or "
                "hydra/launcher=process on this machine",
            )

    def run_points(self, points: Sequence[Point]) -> list[tuple[Point, str]]:
        todo = unfinished(points)
        queue = read_queue() if todo else {}
        jobs = {job: point for point in todo if (job := job_of(point)) in queue}
        new = not_running([point for point in todo if point not in jobs.values()])
        if jobs:
            log.info("%d runs have a job already", len(jobs))
        if self.conf.dry_run:
            print(self.preview(new))
            return []
        jobs |= self.submit(new)
        if not self.conf.wait or not jobs:
            log.info("%s", what_goes_on(jobs, self.folder))
            return []
        try:
            return follow(jobs, self.folder)
        except (KeyboardInterrupt, Terminated):
            log.info("%s", what_goes_on(jobs, self.folder))
            raise

    def executor(self) -> Any:
        """submitit's executor with the options of this launcher."""
        from submitit import SlurmExecutor

        conf = self.conf
        executor = SlurmExecutor(str(self.logs), max_num_timeout=conf.max_requeues, python=conf.python)
        optional_words = {
            "partition": conf.partition,
            "account": conf.account,
            "qos": conf.qos,
            "constraint": conf.constraint,
            "gpus_per_node": conf.gpus or None,
            "mem": None if conf.mem_gb is None else f"{round(conf.mem_gb * 1024)}MB",
            "setup": list(conf.setup) or None,
        }
        executor.update_parameters(
            job_name="qerl",
            time=conf.timeout_min,
            cpus_per_task=conf.cpus,
            signal_delay_s=conf.signal_s,
            array_parallelism=conf.array_parallelism or 1_000_000,
            srun_args=[f"--cpus-per-task={conf.cpus}"],  # which srun no longer takes from sbatch
            additional_parameters={"requeue": True, **(conf.additional or {})},  # after a node is lost, too
            **{key: value for key, value in optional_words.items() if value is not None},
        )
        return executor

    @property
    def logs(self) -> Path:
        """Where Slurm writes what jobs print, and submitit what it needs."""
        return (self.folder / ".slurm").absolute()

    def jobs(self, points: Sequence[Point]) -> list[SlurmJob]:
        return [
            SlurmJob(
                overrides=point.overrides,
                run_dir=point.run_dir,
                cwd=Path.cwd(),
                ranks=self.conf.ranks,
                timeout_min=self.conf.timeout_min,
                save_within_s=0.9 * self.conf.signal_s,
            )
            for point in points
        ]

    def submit(self, points: Sequence[Point]) -> dict[str, Point]:
        """Submit `points` in job arrays; each point by its job. Raises ConfigError if Slurm refuses them."""
        submitted: dict[str, Point] = {}
        size = self.conf.array_size or max_array_size()
        executor = self.executor()
        for start in range(0, len(points), size):
            part = points[start : start + size]
            try:
                with submission_environment(self.conf), executor.batch():
                    jobs = [executor.submit(job) for job in self.jobs(part)]
            except Exception as error:  # submitit's, with what sbatch said; its class has changed between releases
                raise refusal(error, len(submitted), len(points), self.conf) from error
            for job, point in zip(jobs, part, strict=True):
                point.run_dir.mkdir(parents=True, exist_ok=True)
                record = {"scheduler": "slurm", "job": job.job_id, "submitted": time.time()}
                write_atomically(point.run_dir / JOB_FILE, json.dumps(record))
                submitted[job.job_id] = point
        if submitted:
            log.info("submitted %d runs as %s", len(submitted), ", ".join(arrays(submitted)))
        return submitted

    def preview(self, points: Sequence[Point]) -> str:
        """The script of the first array, and the points of all."""
        size = self.conf.array_size or max_array_size()
        executor = self.executor()
        if len(points) > 1:
            executor.parameters["map_count"] = min(size, len(points))
        script = executor._make_submission_file_text(executor._submitit_command_str, "preview")
        words = [f"  {' '.join(point.overrides)}" for point in points]
        number_of = -(-len(points) // size)
        return "\n".join([script, f"{len(points)} runs in {number_of} job arrays; not submitted:", *words])


def job_of(point: Point) -> str | None:
    """The job that was last submitted for a point."""
    path = point.run_dir / JOB_FILE
    return str(read_object(path, "Delete it").get("job")) if path.exists() else None


def max_array_size() -> int:
    """How many tasks the cluster allows in a job array: one less than MaxArraySize, which is 1001 if nothing is set."""
    asked = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True)
    found = re.search(r"MaxArraySize\s*=\s*(\d+)", asked.stdout)
    return max(1, int(found[1]) - 1) if found else 1000


def refusal(error: Exception, submitted: int, total: int, conf: SlurmOptions) -> ConfigError:
    """What Slurm said against a job, with what there is instead."""
    lines = re.findall(r"(?:sbatch|slurm\w*): (?:error: )?([^\n]+)", str(error))
    said = "; ".join(lines) or " ".join(str(error).split())
    command = ["sinfo", "--noheader", "--format=%P, %D nodes, %c cores, %m MB, %G"]
    asked = subprocess.run(command, capture_output=True, text=True)
    offers = "; ".join(asked.stdout.splitlines()) or "nothing (sinfo does not answer)"
    return ConfigError(
        f"Slurm refuses the jobs: {said}. hydra.launcher asks for partition={conf.partition}, gpus={conf.gpus}, "
        f"cpus={conf.cpus}, mem_gb={conf.mem_gb}, timeout_min={conf.timeout_min}; the cluster has {offers}. "
        f"{submitted} of {total} runs were submitted before; the same command follows these and submits the others"
    )
