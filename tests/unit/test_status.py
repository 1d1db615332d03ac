"""What `qerl-bench status` says of runs that go on, failed, were stopped, are queued, or have yet to begin."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from qerl_bench.commands import status as command
from qerl_core.checks import ConfigError
from qerl_core.rundir import locks
from qerl_core.rundir.read_files import REMEDY
from qerl_core.rundir.run_checks import check_run_dir
from qerl_core.sweeps import listing, status
from qerl_core.sweeps.listing import listed
from tests.run_folders import write_run

STEPS = "steps: 100\n"


@pytest.fixture
def run(tmp_path: Path):
    """run(name, log, steps): the folder of a run that has made `steps` steps of ten seconds each."""

    def make(name: str, log: str = "", steps: int = 0) -> Path:
        records = [{"kind": "train", "step": step, "time": 1000.0 + 10 * step} for step in range(1, steps + 1)]
        folder = write_run(tmp_path / name, STEPS, records)
        (folder / "run.log").write_text(log)
        return folder

    return make


def test_each_state_and_the_time_left(tmp_path: Path, run, capsys: pytest.CaptureFixture[str]) -> None:
    (run("a-done", steps=100) / "done.json").write_text("{}")
    run("b-failed", "09:00:00 step 3\n09:00:01 failed: too hot\nTraceback\n  File x\n", steps=3)
    run("c-killed", "09:00:01 failed: too hot\n09:30:00 step 4\n", steps=4)
    run("d-stopped", "09:00:01 failed: SIGTERM\n", steps=5)
    queued = run("e-queued")
    (queued / "job.json").write_text(json.dumps({"job": "12_3", "submitted": 0}))
    os.utime(queued / "run.log", (0, 0))
    first = run("f-running", steps=40)
    run("g-running", steps=60)
    half = run("i-half", "09:00:01 failed: SIGTERM\n", steps=10)
    held = [locks.lock(first / ".lock"), locks.lock(tmp_path / "g-running" / ".lock")]
    with listed(tmp_path, [tmp_path / "a-done", first, tmp_path / "h-waiting", half]):
        command.main([str(tmp_path)])
    for lock in held:
        assert lock is not None
        lock.close()
    *rows, total = capsys.readouterr().out.splitlines()
    found = {Path(row.split()[4]).name: (row.split()[0], row.split()[1], row.split("  ")[-1].strip()) for row in rows}
    folder = str(tmp_path)
    assert found == {
        "a-done": ("done", "100", f"{folder}/a-done"),
        "b-failed": ("failed", "3", "too hot"),
        "c-killed": ("unfinished", "4", f"{folder}/c-killed"),
        "d-stopped": ("unfinished", "5", "stopped by SIGTERM"),
        "e-queued": ("queued", "0", f"as job 12_3 since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(0))}"),
        "f-running": ("running", "40", "about 10:00 left"),
        "g-running": ("running", "60", "about 6:40 left"),
        "h-waiting": ("waiting", "0", f"{folder}/h-waiting"),
        "i-half": ("waiting", "10", "stopped by SIGTERM"),
    }
    assert all(f"pid {os.getpid()}, since 20" in row for row in rows if "running" in row.split()[0])
    # two at a time: 60 + 40 + 100 + 100 + 90 steps of 10 s
    assert total == "9 runs, 1 done, 1 failed, 1 queued, 2 running, 2 unfinished, 2 waiting; about 32:30 left"
    assert not (tmp_path / ".sweeps").exists()
    command.main([folder])
    assert "waiting" not in capsys.readouterr().out  # the sweep has ended


def test_what_was_killed_in_a_sweep_is_not_waited_for(tmp_path: Path, run) -> None:
    """It waits if another sweep of it has begun since."""
    killed, old = run("killed", steps=4), run("old", steps=4)
    os.utime(old / "run.log", (0, 0))
    with listed(tmp_path, [killed, old]):
        now = time.time()
        os.utime(killed / "run.log", (now + 10, now + 10))
        assert [one.state for one in status.statuses([tmp_path])] == ["unfinished", "waiting"]
        with listed(tmp_path, [killed]):
            for place in tmp_path.glob(".sweeps/*.json"):
                if str(old) not in place.read_text():
                    os.utime(place, (now + 20, now + 20))
            assert [one.state for one in status.statuses([tmp_path])] == ["waiting", "waiting"]


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("echo '12_3|PENDING|Resources'", "queued"),
        ("echo '12_3|CANCELLED|None'", "unfinished"),
        ("echo '12_4|RUNNING|n1'", "unfinished"),
        ("echo down >&2; exit 1", "queued"),
        (None, "queued"),
    ],
)
def test_a_job_that_left_the_queue_before_it_began_is_not_queued(
    tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch, said: str | None, state: str
) -> None:
    """As Slurm's squeue says; without it, or an answer, nothing is known."""
    programs = tmp_path / "programs"
    programs.mkdir()
    if said is not None:
        (programs / "squeue").write_text(f"#!/bin/sh\necho >> {tmp_path / 'asked'}\n{said}\n")
        (programs / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin" if said else str(programs))
    record = json.dumps({"scheduler": "slurm", "job": "12_3", "submitted": 0})
    for name in ("one", "two"):
        (run(name) / "job.json").write_text(record)
        os.utime(tmp_path / name / "run.log", (0, 0))
    found = status.statuses([tmp_path])
    assert [one.state for one in found] == [state, state]
    assert all("12_3" in one.note for one in found)
    assert said is None or (tmp_path / "asked").read_text() == "\n"  # once for all runs


def test_a_folder_without_runs_says_what_a_run_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.main([str(tmp_path)])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("0 runs: ") and "config.yaml" in line and "report" in line


DAMAGE = {  # what happens to a finished run
    "done.json": lambda file: file.write_text('{"seals'),
    "eval.json": lambda file: file.unlink(),
    "metrics.jsonl": lambda file: os.truncate(file, 100),
    "checkpoints/step_000006/manifest.json": lambda file: file.unlink(),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_is_not_done(runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """`status` and the run itself say the same words, the remedy among them."""
    folder = runs.copy("finished", tmp_path / "run")
    assert [one.state for one in status.statuses([tmp_path])] == ["done"]
    DAMAGE[name](folder / name)
    os.utime(folder / "done.json", ns=(0, 0))
    command.main([str(tmp_path)])
    line, total = capsys.readouterr().out.splitlines()
    assert line.startswith("damaged ") and total == "1 runs, 1 damaged"  # and no cost
    with pytest.raises(ConfigError) as refused:
        check_run_dir(folder, runs.config)
    assert line.endswith(str(refused.value)) and re.search("delete", str(refused.value), re.IGNORECASE)


def test_a_record_that_is_missing_is_named_with_the_remedy(run, tmp_path: Path) -> None:
    folder = run("a", steps=2)
    (folder / "done.json").write_text('{"seconds": 1.0}')
    (folder / "metrics.jsonl").unlink()
    (found,) = status.statuses([tmp_path])
    assert found.state == "damaged" and found.note.startswith(f"{folder / 'metrics.jsonl'}: No such file")
    assert found.note.endswith(REMEDY)


def test_watching_ends_when_nothing_goes_on(
    run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run("a", steps=10)
    held = locks.lock(folder / ".lock")
    assert held is not None
    monkeypatch.setattr(time, "sleep", lambda seconds: ((folder / "done.json").write_text("{}"), held.close()))
    command.main([str(tmp_path), "watch=true"])
    printed = capsys.readouterr().out
    assert printed.count("1 runs") == 2 and printed.rstrip().endswith("1 runs, 1 done")


def test_runs_to_come_are_shown_as_the_others_are(tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("a")
    monkeypatch.chdir(tmp_path.parent)
    folder = Path(tmp_path.name)
    with listed(tmp_path, [tmp_path / "a", tmp_path / "b"]):
        assert [one.run for one in status.statuses([folder])] == [folder / "a", folder / "b"]


def test_a_sweep_may_end_while_it_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "holder", lambda lock: lock.with_suffix(".json").unlink() or "somebody")
    with listing.listed(tmp_path, [tmp_path / "a"]):
        assert listing.going_on(tmp_path) == {}
