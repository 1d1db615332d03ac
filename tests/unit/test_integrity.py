"""Every file of a run, damaged in every way: refused by name, or made again; never taken for whole.

tests/faults/damage.py holds the damages.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from omegaconf import OmegaConf

from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build
from qerl_core.checks import ConfigError
from qerl_core.rundir.checkpoints import last_checkpoint
from qerl_core.rundir.checksums import DONE, SEALS
from qerl_core.rundir.run_checks import MADE_AGAIN, check_run_dir
from qerl_core.rundir.run_dir import RunDir
from qerl_studies.runs.find import find_runs
from qerl_studies.runs.load import load_run
from tests.failing import failing
from tests.faults.damage import DAMAGES

if TYPE_CHECKING:
    from conftest import Runs

RECORDS = ("config.yaml", "metrics.jsonl", "rollouts.jsonl", "eval.json", "samples.parquet", SEALS)
CHECKPOINT = ("adapter/adapter_model.safetensors", "adapter/adapter_config.json", "trainer.pt", "state.json")


def _damaged(runs: Runs, state: str, file: str, tmp_path: Path) -> list[tuple[str, Path]]:
    """A copy of the run for each damage, with `file` damaged."""
    copies = [(name, runs.copy(state, tmp_path / name)) for name in DAMAGES]
    for name, folder in copies:
        before = (folder / file).read_bytes()
        DAMAGES[name](folder / file)
        assert not (folder / file).exists() or (folder / file).read_bytes() != before, name
    return copies


def _refusal(check: Callable[..., object], *arguments: Any) -> str:
    """The message of a ConfigError, or that it was taken for whole."""
    try:
        check(*arguments)
    except ConfigError as error:
        return str(error)
    return "taken for whole"


@pytest.mark.parametrize("state", ["unfinished", "finished"])
def test_whole_runs_are_taken(runs: Runs, state: str, tmp_path: Path) -> None:
    folder = runs.copy(state, tmp_path / "run")
    check_run_dir(folder, runs.config)
    assert load_run(folder).finished == (state == "finished")


@pytest.mark.parametrize("state", ["unfinished", "finished"])
@pytest.mark.parametrize("file", RECORDS)
def test_a_damaged_record_is_refused_by_name(runs: Runs, state: str, file: str, tmp_path: Path) -> None:
    for damage, folder in _damaged(runs, state, file, tmp_path):
        for message in (_refusal(check_run_dir, folder, runs.config), _refusal(load_run, folder)):
            assert file in message and str(folder) in message, (damage, message)
        assert find_runs(tmp_path / damage) == [folder]  # a reader does not overlook it
        with pytest.raises(ConfigError):
            RunDir(folder, runs.config)


@pytest.mark.parametrize("file", MADE_AGAIN)
def test_what_each_attempt_writes_is_made_again(
    runs: Runs, file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for damage, folder in _damaged(runs, "unfinished", file, tmp_path / "unfinished"):
        assert file in _refusal(load_run, folder), damage
        caplog.clear()
        with RunDir(folder, runs.config) as run:
            run.write_environment("cpu", None)
        assert (file in caplog.text) == (file == "env.json"), damage  # what it said is lost
    for damage, folder in _damaged(runs, "finished", file, tmp_path / "finished"):
        for message in (_refusal(check_run_dir, folder, runs.config), _refusal(load_run, folder)):
            assert f"Delete {file} and {DONE}" in message, damage


def test_a_damaged_done_json_is_refused_or_made_again(runs: Runs, tmp_path: Path) -> None:
    for damage, folder in _damaged(runs, "finished", DONE, tmp_path):
        message = _refusal(check_run_dir, folder, runs.config)
        assert message == "taken for whole" if damage == "delete" else DONE in message, damage
        (folder / DONE).unlink(missing_ok=True)
        check_run_dir(folder, runs.config)


@pytest.mark.parametrize("state", ["unfinished", "finished"])
@pytest.mark.parametrize("file", [*CHECKPOINT, "manifest.json"])
def test_a_damaged_checkpoint(
    runs: Runs, state: str, file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last one is refused; an earlier one is named when the run continues, which does not need it."""
    newest = last_checkpoint(getattr(runs, state))
    assert newest is not None
    for damage, folder in _damaged(runs, state, f"checkpoints/{newest.name}/{file}", tmp_path / "newest"):
        message = _refusal(check_run_dir, folder, runs.config)
        assert newest.name in message and (file in message or file == "manifest.json"), (damage, message)
    for damage, folder in _damaged(runs, state, f"checkpoints/step_000002/{file}", tmp_path / "earlier"):
        caplog.clear()
        with RunDir(folder, runs.config) as run:
            if state == "unfinished":
                assert run.resume_step() == 4
                assert "step_000002" in caplog.text and (file in caplog.text or file == "manifest.json"), damage


@pytest.mark.parametrize("file", ["metrics.jsonl", "rollouts.jsonl"])
def test_the_message_says_how_far_the_record_is_whole(runs: Runs, file: str, tmp_path: Path) -> None:
    """And following it, the run continues."""
    folder = runs.copy("finished", tmp_path / "run")
    lines = (folder / file).read_text().splitlines(keepends=True)
    in_step_5 = next(number for number, line in enumerate(lines) if json.loads(line)["step"] == 5)
    del lines[in_step_5]
    (folder / file).write_text("".join(lines))
    with pytest.raises(ConfigError) as caught:
        check_run_dir(folder, runs.config)
    assert f"whole up to step 4: delete {DONE}, checkpoints/step_000006" in str(caught.value)
    (folder / DONE).unlink()
    shutil.rmtree(folder / "checkpoints" / "step_000006")
    with RunDir(folder, runs.config) as run:
        assert run.resume_step() == 4
    lines[0] = lines[0].replace("0.", "1.", 1)
    (folder / file).write_text("".join(lines))
    assert "belongs to no checkpoint" in _refusal(check_run_dir, folder, runs.config)


@pytest.mark.parametrize(
    "tail", [b'{"kind": "train", "st', b"\x80\x00\xff\n", b"[1]\n", b'{"step": 5, "kind": "train"}\n']
)
def test_what_is_behind_the_last_checkpoint_is_made_again(runs: Runs, tail: bytes, tmp_path: Path) -> None:
    folder = runs.copy("unfinished", tmp_path / "run")
    whole = {file: (folder / file).read_bytes() for file in ("metrics.jsonl", "rollouts.jsonl")}
    for file in whole:
        with open(folder / file, "ab") as stream:
            stream.write(tail)
    with RunDir(folder, runs.config) as run:
        assert run.resume_step() == 4
    assert {file: (folder / file).read_bytes() for file in whole} == whole


def test_a_kill_between_a_seal_and_its_file(runs: Runs, tmp_path: Path) -> None:
    """Old or new, the file is whole; the seal that came to nothing is forgotten."""
    folder = runs.copy("unfinished", tmp_path / "run")
    old = (folder / "eval.json").read_text()
    for number, name in enumerate(("eval.json", "new.json")):
        with (
            RunDir(folder, runs.config) as run,
            failing(os, "replace", KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            run.write(name, f"[{number}]")
        load_run(folder)
        with open(folder / SEALS, "a") as file:
            file.write('{"file": "eval.json", "by')  # killed in the middle of the next line, too
        with RunDir(folder, runs.config) as run:
            run.write("other.json", "1")
        load_run(folder)
    assert (folder / "eval.json").read_text() == old
    with RunDir(folder, runs.config) as run:
        run.write("eval.json", "[]")
        run.write("other.json", "2")
    load_run(folder)
    (folder / "eval.json").write_text(old)
    assert "eval.json" in _refusal(load_run, folder)


def test_a_seal_names_a_file_of_the_run_only(runs: Runs, tmp_path: Path) -> None:
    folder = runs.copy("unfinished", tmp_path / "run")
    with open(folder / SEALS, "a") as file:
        file.write(json.dumps({"file": "../../secret", "bytes": 1, "sha256": ""}) + "\n")
    assert SEALS in _refusal(load_run, folder)


def test_a_run_from_before_seals_is_read_with_one_line(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = runs.copy("finished", tmp_path / "run")
    done = json.loads((folder / DONE).read_text())
    del done["seals"]
    (folder / DONE).write_text(json.dumps(done))
    (folder / SEALS).unlink()
    for file in folder.glob("checkpoints/*/manifest.json"):
        entries = json.loads(file.read_text())["files"]
        file.write_text(json.dumps({name: entry["sha256"] for name, entry in entries.items()}))
    with caplog.at_level(logging.INFO, "qerl_core"):
        load_run(folder)
    assert sum("before seals" in record.message for record in caplog.records) == 1
    (folder / DONE).unlink()
    with RunDir(folder, runs.config) as run:
        assert run.resume_step() == 6
    (folder / "checkpoints" / "step_000006" / "state.json").write_text("{}")
    assert "state.json" in _refusal(check_run_dir, folder, runs.config)


def test_a_folder_that_is_no_checkpoint_is_named(runs: Runs, tmp_path: Path) -> None:
    folder = runs.copy("unfinished", tmp_path / "run")
    (folder / "checkpoints" / "step_abc").mkdir()
    assert "step_abc" in _refusal(check_run_dir, folder, runs.config)


@pytest.mark.parametrize("file", ["metrics.jsonl", "rollouts.jsonl", "eval.json"])
def test_a_finished_file_does_not_grow(runs: Runs, file: str, tmp_path: Path) -> None:
    folder = runs.copy("finished", tmp_path / "run")
    with open(folder / file, "ab") as stream:
        stream.write(b" \n")
    assert file in _refusal(load_run, folder)


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("operation", [2, 9, 20])
def test_a_run_killed_at_any_file_continues_to_the_same_numbers(
    runs: Runs, operation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before and after a file takes its place, and in the middle of a line."""
    config = OmegaConf.merge(runs.config, {"root": str(tmp_path), "name": "run"})
    folder = tmp_path / "runs" / "run"
    left = [operation]

    def count() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    def replace(source: Path, target: Path) -> None:
        count()
        rename(source, target)
        count()

    def append(run: RunDir, name: str, records: list[dict[str, Any]]) -> None:
        if left[0] == 1:
            with open(run.path / name, "a") as file:
                file.write('{"kind": "train", "st')
        count()
        add(run, name, records)

    rename, add = os.replace, RunDir.append
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", replace)
        patch.setattr(RunDir, "append", append)
        with pytest.raises(KeyboardInterrupt):
            run_experiment(build(config), config)
    run_experiment(build(config), config)
    assert runs.numbers(load_run(folder).path) == runs.numbers(runs.finished)
