"""What jobs of Slurm leave for whoever reads their folders, with stubs for it and for the runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hydra import compose, initialize_config_dir

from qerl_bench.sweep import slurm as slurm
from qerl_bench.sweep.slurm_job import JOB_FILE, SlurmJob
from qerl_core.checks import ConfigError
from qerl_core.options.composer import HYDRA_DEFAULTS
from qerl_core.process.installation import CONF_DIR
from qerl_core.sweeps.points import Point
from qerl_core.sweeps.status import state_of

STUB = """
import sys
from pathlib import Path
folder = Path(sys.argv[1])
exec(sys.argv[2])
"""
REFUSED = "print('error: no GPU'); sys.exit(2)"


@pytest.fixture(autouse=True)
def stub(run_by: Callable[[str], None]) -> None:
    run_by(STUB)


@pytest.fixture
def submitit(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers = ModuleType("submitit.helpers")
    helpers.DelayedSubmission = lambda again: again  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "submitit", ModuleType("submitit"))
    monkeypatch.setitem(sys.modules, "submitit.helpers", helpers)


def slurm_job(folder: Path, code: str) -> SlurmJob:
    """A job that was submitted after the last attempt."""
    folder.mkdir()
    (folder / "run.log").write_text("09:00:00 step 3\n")
    os.utime(folder / "run.log", (0, 0))
    (folder / JOB_FILE).write_text(json.dumps({"job": "12_3", "submitted": 1}))
    assert state_of(folder)[0] == "queued"
    words = [str(folder), code]
    return SlurmJob(overrides=words, run_dir=folder, cwd=folder.parent, timeout_min=1, save_within_s=60)


@pytest.mark.parametrize(
    ("code", "state", "log"),
    [
        (REFUSED, ("failed", "error: no GPU"), "failed: error: no GPU"),
        ("import os; os.kill(os.getpid(), 9)", ("failed", "killed by SIGKILL"), "failed: killed by SIGKILL"),
        ("open(folder / 'run.log', 'a').write('09:00:01 failed: hot\\n'); sys.exit(1)", ("failed", "hot"), "hot"),
    ],
)
def test_why_a_slurm_job_ended_is_in_run_log_once(tmp_path: Path, code: str, state: tuple[str, str], log: str) -> None:
    submitted = slurm_job(tmp_path / "run", code)
    with pytest.raises(SystemExit) as end:
        submitted()
    assert end.value.code in (1, 2, 128 + 9)
    assert state_of(tmp_path / "run") == state
    lines = (tmp_path / "run" / "run.log").read_text().splitlines()
    assert len(lines) == 2 and lines[1].endswith(log)


@pytest.mark.usefixtures("submitit")
def test_a_run_that_goes_back_into_the_queue_is_queued(tmp_path: Path) -> None:
    submitted = slurm_job(tmp_path / "run", "pass")
    os.utime(tmp_path / "run" / JOB_FILE, (1, 1))
    os.utime(tmp_path / "run" / "run.log", (2, 2))  # written by the attempt that the walltime ended
    submitted.save = lambda limit_s: True  # type: ignore[method-assign]
    assert state_of(tmp_path / "run")[0] == "unfinished"
    assert submitted.checkpoint().overrides == submitted.overrides
    assert state_of(tmp_path / "run")[0] == "queued"


@pytest.mark.usefixtures("submitit")
def test_a_walltime_shorter_than_a_step_is_told_with_the_remedy_and_keeps_what_there_is(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    submitted = slurm_job(folder, "pass")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    os.utime(folder / JOB_FILE, (1, 1))
    assert submitted.checkpoint() is None  # so that Slurm does not repeat it
    state, reason = state_of(folder)
    assert state == "failed" and "walltime of 1 min" in reason and "raise hydra.launcher.timeout_min" in reason
    assert (folder / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_without_a_scheduler_a_sweep_is_refused_before_anything_is_made(
    tmp_path: Path, packages: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    packages(submitit=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no sbatch here: use a login node, or hydra/launcher=process"):
        slurm.SlurmSweep().launch([["seed=0", f"root={tmp_path}"]], 0)
    assert [*tmp_path.iterdir()] == []


def test_a_dry_run_leaves_out_what_has_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [Point([name], name, tmp_path / name, finished=False) for name in ("new", "pending")]
    points[1].run_dir.mkdir()
    (points[1].run_dir / JOB_FILE).write_text(json.dumps({"job": "12_3"}))
    previewed: list[Point] = []
    launcher = slurm.SlurmSweep(dry_run=True)
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho '12_3|PENDING|Resources'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    launcher.preview = previewed.extend  # type: ignore[method-assign]
    assert launcher.run_points(points) == [] and previewed == points[:1]


def test_more_options_of_a_scheduler_can_be_given() -> None:
    with initialize_config_dir(str(CONF_DIR), **HYDRA_DEFAULTS):
        chosen = ["hydra/launcher=slurm", "hydra.launcher.additional={reservation: x}"]
        conf = compose("run", chosen, return_hydra_config=True).hydra.launcher
    assert conf.additional == {"reservation": "x"}


def test_a_launcher_refuses_options_without_names() -> None:
    with pytest.raises(ConfigError, match=r"hydra\.launcher\.additional.*name: value.*reservation"):
        slurm.SlurmSweep(additional="reservation").check()
