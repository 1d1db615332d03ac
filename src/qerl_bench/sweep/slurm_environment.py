"""The environment in which jobs are submitted: SBATCH_* overrules a job's script, and a job around it is inherited."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qerl_core.process.inherited import is_of_launcher

OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SUBMITIT_")
OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")  # how Slurm is found at all
ALWAYS_SAID = (
    "ARRAY_INX JOB_NAME OUTPUT ERROR OPEN_MODE SIGNAL TIMELIMIT REQUEUE NO_REQUEUE CPUS_PER_TASK CPUS_PER_GPU "
    "TRES_PER_TASK WAIT"
)
SAID_BY = {  # option of the launcher -> the variables, behind SBATCH_, that would overrule it
    "partition": "PARTITION",
    "account": "ACCOUNT",
    "qos": "QOS",
    "constraint": "CONSTRAINT",
    "gpus": "GPUS GPUS_PER_NODE GPUS_PER_TASK GRES",
    "mem_gb": "MEM_PER_NODE MEM_PER_CPU MEM_PER_GPU",
}


def is_misleading(name: str, options: Any, in_job: bool) -> bool:
    """Whether a variable would change what the launcher's `options` ask for."""
    if is_of_launcher(name):
        return True
    if in_job:
        return name.startswith(OF_A_JOB) and name not in OF_THE_CLUSTER
    said = [ALWAYS_SAID, *(words for option, words in SAID_BY.items() if getattr(options, option) is not None)]
    return name.startswith("SBATCH_") and name.removeprefix("SBATCH_") in " ".join(said).split()


@contextmanager
def submission_environment(options: Any) -> Iterator[None]:
    """In this block the environment has nothing of a job around this process, and nothing that overrules `options`."""
    in_job = "SLURM_JOB_ID" in os.environ
    hidden = {name: value for name, value in os.environ.items() if is_misleading(name, options, in_job)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
