"""Sweeps on a real Slurm: two nodes with two fake GPUs each, on this machine. Whatever happens to jobs, nodes and the
scheduler, runs end with the numbers that the process launcher gives, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from qerl_core.sweeps.status import statuses
from tests.cluster import slurm as fake
from tests.cluster.runs import STEPS, Expected, Sweeps, finished, require_numbers, wait_until
from tests.cluster.slurm import Slurm

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(fake.missing() != "", reason=fake.missing())]
LAUNCHER = ("hydra/launcher=slurm", "hydra.launcher.cpus=1", "hydra.launcher.mem_gb=0.5")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory(prefix="slurm-") as place, fake.cluster(Path(place)) as cluster:
        yield cluster


@pytest.fixture
def sweeps(slurm: Slurm, tmp_path: Path) -> Iterator[Sweeps]:
    slurm.wait_for_nodes()
    started = Sweeps(tmp_path, slurm.environment, LAUNCHER)
    yield started
    started.stop()


def job_of(sweeps: Sweeps, seed: int) -> str:
    return (sweeps.folder(seed) / "job.json").read_text().split('"job": "')[1].split('"')[0]


def test_a_sweep_equals_that_of_the_process_launcher_and_one_failure_does_not_hurt_the_others(
    sweeps: Sweeps, expected: Expected
) -> None:
    sweeps.hurry.touch()
    obstacle = sweeps.folder(1) / "metrics.jsonl"
    obstacle.mkdir(parents=True)
    code, said = sweeps.run("seed=0,1", "hydra.launcher.array_size=1")  # two arrays
    assert code == 1, said
    assert "1 of 2 runs failed" in said and "IsADirectoryError" in said.splitlines()[-2]
    assert [finished(sweeps.folder(seed)) for seed in range(2)] == [True, False]
    obstacle.rmdir()
    code, said = sweeps.run("seed=0,1")
    assert code == 0 and "1 finished before, 1 to do" in said, said
    for seed in range(2):
        require_numbers(sweeps.folder(seed), expected(seed))


def test_what_happens_to_jobs_costs_no_numbers(slurm: Slurm, sweeps: Sweeps, expected: Expected) -> None:
    """Of three runs the walltime of one is over twice, another is preempted, and the third is cancelled. Meanwhile the
    scheduler goes away, and the launcher is stopped and started again."""
    words = ("seed=0,1,2",)
    launcher = sweeps.start(*words)
    wait_until(lambda: all(sweeps.steps(seed) >= 2 for seed in range(3)))
    jobs = [job_of(sweeps, seed) for seed in range(3)]
    launcher.process.send_signal(signal.SIGINT)
    code, said = launcher.ended()
    assert code == 130 and f"scancel {jobs[0].split('_')[0]}" in said and "3 runs go on" in said, said

    slurm.kill("slurmctld")
    code, said = sweeps.run(*words)
    assert code == 2 and "Slurm does not answer" in said, said
    slurm.start("slurmctld")
    wait_until(lambda: "n1" in slurm.ask("squeue"))
    launcher = sweeps.start(*words)
    launcher.wait_for("3 runs have a job already")

    slurm.ask("scancel", jobs[2])
    slurm.ask("scontrol", "requeue", jobs[1])  # as preemption does
    for _ in range(2):
        before = sweeps.steps(0)
        slurm.ask("scancel", "--signal=USR2", jobs[0])  # as Slurm does when the walltime is nearly over
        wait_until(lambda before=before: finished(sweeps.folder(0)) or sweeps.steps(0) > before + 1)
    slurm.kill("slurmctld")
    launcher.wait_for("Slurm does not answer")
    slurm.start("slurmctld")
    sweeps.hurry.touch()
    code, said = launcher.ended()
    assert code == 1 and "Slurm does not answer" in said, said
    assert "1 of 3 runs failed" in said and "run-2: SIGTERM" in said and "CANCELLED" in said, said
    code, said = sweeps.run(*words)
    assert code == 0 and "2 finished before, 1 to do" in said, said
    for seed in range(3):
        require_numbers(sweeps.folder(seed), expected(seed))
        attempts = len([*sweeps.folder(seed).glob("env*.json")])
        assert attempts == {0: 3, 1: 2, 2: 2}[seed]


def test_a_job_that_is_cancelled_before_it_begins_is_no_longer_queued(
    slurm: Slurm, sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    launcher = sweeps.start("seed=0", "hydra.launcher.additional={hold: true}")
    launcher.wait_for("submitted 1 runs")
    assert [status.state for status in statuses([sweeps.place])] == ["queued"]
    slurm.ask("scancel", job_of(sweeps, 0))
    code, said = launcher.ended()
    assert code == 1 and "left the queue before it began" in said, said
    assert [status.state for status in statuses([sweeps.place])] == ["unfinished"]


def test_a_walltime_shorter_than_a_step_is_told_and_not_repeated(slurm: Slurm, sweeps: Sweeps) -> None:
    launcher = sweeps.start("seed=0", "save_on_term=false", f"save_every={STEPS}")
    wait_until(lambda: sweeps.steps(0) >= 1)
    slurm.ask("scancel", "--signal=USR2", job_of(sweeps, 0))
    code, said = launcher.ended()
    assert code == 1 and "1 of 1 runs failed" in said and "hydra.launcher.timeout_min" in said, said


def test_a_run_whose_node_is_lost_goes_on_in_another(slurm: Slurm, sweeps: Sweeps, expected: Expected) -> None:
    launcher = sweeps.start("seed=0")
    wait_until(lambda: sweeps.steps(0) >= 3)
    lost = slurm.ask("squeue", "-h", "-o", "%N").strip()
    slurm.kill(lost)
    sweeps.hurry.touch()
    code, said = launcher.ended()
    slurm.start(lost)
    assert len([*sweeps.folder(0).glob("env*.json")]) == 2
    assert code == 0 and {word.rstrip(",") for word in said.split() if word in ("n1,", "n2,")} == {"n1", "n2"}, said
    require_numbers(sweeps.folder(0), expected(0))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("hydra.launcher.partition=nope", ["partition", "nope", "main*, 2 nodes"]),
        ("hydra.launcher.gpus=3", ["gpus=3", "gpu:2"]),
        ("hydra.launcher.timeout_min=1", ["signal_s", "60 s", "300"]),
        ("hydra.launcher.ranks=2", ["gpus=1", "ranks=2"]),
        ("hydra.launcher.mem_gb=64", ["mem_gb=64", "4000 MB"]),
    ],
)
def test_what_cannot_work_is_refused_in_words_and_leaves_nothing(sweeps: Sweeps, words: str, says: list[str]) -> None:
    code, said = sweeps.run("seed=0,1", words)
    assert code == 2 and "Traceback" not in said
    assert all(word in said for word in says), said
    assert [*sweeps.place.glob("runs/run-*")] == []


def test_a_machine_without_slurm_is_told_so(sweeps: Sweeps, tmp_path: Path) -> None:
    bare = {**os.environ, "PATH": str(tmp_path)}
    code, said = Sweeps(tmp_path, bare, LAUNCHER).run("seed=0")
    assert code == 2 and "sbatch" in said and "hydra/launcher=process" in said, said


def test_a_dry_run_submits_nothing(slurm: Slurm, sweeps: Sweeps) -> None:
    code, said = sweeps.run("seed=0,1", "hydra.launcher.dry_run=true", "hydra.launcher.setup=[module load x]")
    assert code == 0 and "#SBATCH --array=0-1%2" in said and "\nmodule load x\n" in said and "seed=1" in said, said
    assert subprocess.run(["squeue", "-h"], env=slurm.environment, capture_output=True, text=True).stdout == ""
