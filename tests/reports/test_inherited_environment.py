"""What a shell inherits from an interactive job or another launcher, and what of it reaches the runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qerl_bench.parallel import joined_ranks
from qerl_bench.sweep.slurm import SlurmSweep
from qerl_core.checks import ConfigError
from qerl_core.process.children import Child, wait
from qerl_core.rundir.attempts import warned_of_changes
from qerl_core.rundir.environment import ARITHMETIC, environment
from qerl_core.sweeps.points import Point
from qerl_core.sweeps.slurm_queue import read_queue
from qerl_studies.runs.environments import block_of
from tests.run_folders import write_run


def program(folder: Path, name: str, shell: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{shell}\n")
    (folder / name).chmod(0o755)


# --- a sweep submitted from inside a job: https://github.com/goodfire-ai/spd/issues/955, ------------------------------
# https://github.com/czbiohub-sf/biahub/issues/96, https://github.com/facebookincubator/submitit/issues/1818,
# https://github.com/huggingface/datatrove/issues/248 and
# https://github.com/aws-samples/aws-eda-slurm-cluster/issues/223

INTERACTIVE = {
    "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "2", "SLURM_MEM_PER_NODE": "4096", "SLURM_CPU_BIND": "mask_cpu:0x3",
    "SLURM_TRES_PER_TASK": "cpu=2", "SRUN_CPUS_PER_TASK": "2", "SBATCH_REQUEUE": "0", "SBATCH_PARTITION": "short",
    "SUBMITIT_EXECUTOR": "slurm", "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29500", "PET_NNODES": "2",
}  # fmt: skip
CLUSTER = {"SLURM_CONF": "/etc/slurm.conf", "WANDB_MODE": "offline"}


class Submits:
    """In the place of submitit's executor: asks sbatch as it does, with the environment of this process."""

    def batch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def submit(self, job: Any) -> SimpleNamespace:
        return SimpleNamespace(job_id=subprocess.run(["sbatch"], capture_output=True, text=True).stdout.strip())


def submitted(folder: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], **options: Any) -> dict[str, str]:
    """The environment in which the launcher asks sbatch if that of the shell has `given`."""
    program(folder, "sbatch", f"env -0 > {folder}/seen; echo 8_0")
    for name, value in {**given, "PATH": f"{folder}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    launcher = SlurmSweep(array_size=10, **options)
    launcher.executor = Submits  # type: ignore[method-assign]
    assert [*launcher.submit([Point(["seed=0"], "run", folder / "run", finished=False)])] == ["8_0"]
    assert given.items() <= os.environ.items(), "the shell's own environment is as it was"
    return dict(line.split("=", 1) for line in (folder / "seen").read_text().split("\0") if line)


def test_nothing_of_an_interactive_job_reaches_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = submitted(tmp_path, monkeypatch, INTERACTIVE | CLUSTER)
    assert not INTERACTIVE.keys() & seen.keys() and seen.items() >= CLUSTER.items()


def test_on_a_login_node_the_launcher_overrules_sbatch_and_null_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overruled = {
        "SBATCH_TIMELIMIT": "10",
        "SBATCH_PARTITION": "short",
        "SBATCH_GRES": "gpu:8",
        "SBATCH_NO_REQUEUE": "1",
    }
    stands = {"SBATCH_ACCOUNT": "mine", "SBATCH_RESERVATION": "lab", "SBATCH_MEM_PER_NODE": "9000"}
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    seen = submitted(tmp_path, monkeypatch, overruled | stands, partition="long")
    assert not overruled.keys() & seen.keys() and seen.items() >= stands.items()


def test_a_filter_of_squeue_hides_no_job_of_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "squeue", '[ -n "$SQUEUE_PARTITION" ] || echo "12_3|PENDING|Resources"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SQUEUE_PARTITION", "short")
    assert [*read_queue()] == ["12_3"]


# --- RANK, WORLD_SIZE and torchrun's own options in the environment ---------------------------------------------------

OF_LAUNCHERS = dict.fromkeys(("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PET_NNODES", "NODE_RANK"), "1")


@pytest.mark.parametrize("given", [None, {"QERL_KEPT": "1"}])
def test_a_run_of_a_sweep_is_no_rank_of_what_started_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str] | None
) -> None:
    for name, value in (OF_LAUNCHERS | {"QERL_KEPT": "1"}).items():
        monkeypatch.setenv(name, value)
    show = f"import os; open({str(tmp_path / 'seen')!r}, 'w').write(' '.join(os.environ))"
    assert wait(Child([sys.executable, "-c", show], None if given is None else OF_LAUNCHERS | given)) == 0
    seen = (tmp_path / "seen").read_text().split()
    assert not OF_LAUNCHERS.keys() & {*seen} and "QERL_KEPT" in seen


@pytest.mark.parametrize(
    "given",
    [
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0"},  # Kubernetes, for a process of its own on each node
        {"WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"},  # a shell that keeps half of what torchrun has set
        {"RANK": "", "WORLD_SIZE": "1"},
    ],
)
def test_a_place_among_processes_that_torchrun_has_not_given_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"torchrun --nproc-per-node N .*env -u .*WORLD_SIZE"), joined_ranks():
        pass


# --- what any shell may hand on: encodings, Python's own switches, other programs' backends ---------------------------

SHELLS = {
    "an ASCII terminal": {"PYTHONIOENCODING": "ascii"},
    "a Latin terminal": {"PYTHONIOENCODING": "latin-1:strict"},
    "warnings are errors": {"PYTHONWARNINGS": "error"},
    "no docstrings and asserts": {"PYTHONOPTIMIZE": "2"},
    "a narrow terminal": {"COLUMNS": "1"},
    "colours": {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1"},
    "tracebacks of Hydra": {"HYDRA_FULL_ERROR": "1"},
    "a notebook's backend": {"MPLBACKEND": "module://gone"},
    "TensorFlow in the place of PyTorch": {"USE_TF": "1", "USE_TORCH": "0"},
    "no number of threads": {"OMP_NUM_THREADS": "many"},
    "a safe path": {"PYTHONSAFEPATH": "1"},
}


def shell(folder: Path, given: dict[str, str], *words: str) -> subprocess.CompletedProcess[bytes]:
    environment = {name: value for name, value in os.environ.items() if name not in ("LC_ALL", "LANG")}
    program = [sys.executable, "-m", "qerl_bench", *words]
    return subprocess.run(program, cwd=folder, env=environment | given, capture_output=True, timeout=120)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shells")
    write_run(folder / "läufe 🦆", "steps: 2\n", [{"kind": "train", "step": 1, "time": 1.0}])
    return folder


@pytest.mark.parametrize("name", SHELLS)
def test_a_shell_changes_neither_what_is_listed_nor_how_bad_input_is_refused(name: str, runs: Path) -> None:
    listed = shell(runs, SHELLS[name], "status", str(runs), "--json")
    assert listed.returncode == 0 and b"Traceback" not in listed.stderr, listed.stderr
    assert [one["run"] for one in json.loads(listed.stdout)] == [str(runs / "läufe 🦆")]
    printed = shell(runs, SHELLS[name], "status", str(runs))
    assert printed.returncode == 0 and printed.stdout.startswith(b"unfinished "), printed.stderr
    refused = shell(runs, SHELLS[name], "run", "quant=nvfp5")
    assert refused.returncode == 2 and b"Traceback" not in refused.stderr
    assert re.search(rb"quant=nvfp5.*nvfp4", refused.stderr, re.DOTALL), refused.stderr


def test_a_shell_whose_texts_are_not_in_utf_8_is_refused_with_the_remedy(runs: Path) -> None:
    given = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    refused = shell(runs, given, "status", str(runs))
    assert refused.returncode == 2 and b"PYTHONUTF8=1" in refused.stderr and b"Traceback" not in refused.stderr
    assert shell(runs, given | {"PYTHONUTF8": "1"}, "status", str(runs)).returncode == 0


@pytest.mark.parametrize("name", ARITHMETIC)
def test_a_shell_that_has_numbers_added_otherwise_is_another_machine(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs of runs are told, and so is a run that goes on in another shell."""
    import torch  # noqa: F401  # warns of values that are no flags if they are set when it is imported

    for one in ARITHMETIC:
        monkeypatch.setenv(one, "")
    plain = environment("cpu")
    monkeypatch.setenv(name, "default")
    asked = environment("cpu")
    assert asked["cpu"] == f"{plain['cpu']} with {name}=default" and block_of(asked) != block_of(plain)
    assert warned_of_changes(Path("run"), plain, asked) and not warned_of_changes(Path("run"), plain, plain)


def test_a_sweep_that_an_agent_starts_is_not_the_agents_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its runs would go on in the record of the one before."""
    for name in ("WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SERVICE", "WANDB_PROJECT"):
        monkeypatch.setenv(name, "x")
    show = f"import os; open({str(tmp_path / 'seen')!r}, 'w').write(' '.join(os.environ))"
    assert wait(Child([sys.executable, "-c", show])) == 0
    assert [name for name in (tmp_path / "seen").read_text().split() if name.startswith("WANDB")] == ["WANDB_PROJECT"]
