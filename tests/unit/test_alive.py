"""What happens to the files of a run while it is alive: nothing that was lost of them is sealed as whole.

tests/faults/damage.py holds the damages.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from qerl_core.checks import ConfigError, TrainingStopped
from qerl_core.rundir.checkpoints import is_finished, last_checkpoint
from qerl_core.rundir.checksums import DONE, SEALS
from qerl_core.rundir.run_checks import check_run_dir
from qerl_core.rundir.run_dir import RunDir
from qerl_core.sweeps.status import state_of
from qerl_studies.runs.load import load_run
from tests.faults.damage import DAMAGES

CFG = OmegaConf.create({"name": "run", "steps": 6, "seed": 0, "quant": {"name": "nvfp4"}})
GROWING = ("metrics.jsonl", "rollouts.jsonl", SEALS)


def make(run: RunDir, *steps: int) -> None:
    """The files of these steps: a checkpoint after each second one, an evaluation after each third."""
    for step in steps:
        run.append("rollouts.jsonl", [{"step": step, "completion": f"{step} apples"}])
        run.log("train", step, {"loss": step / 7})
        if step % 3 == 0:
            run.mend()  # as each evaluation does, before it reads those before it
            run.write("eval.json", json.dumps([{"step": step}]))
        if step % 2 == 0:
            with run.checkpoint(step) as folder:
                (folder / "state.json").write_text(f"{step}")


def begun(folder: Path, *steps: int) -> RunDir:
    run = RunDir(folder, CFG)
    assert run.resume_step() == 0
    make(run, *steps)
    return run


def stopped(run: RunDir, *steps: int) -> str:
    """The words with which the rest of a run is stopped."""
    with pytest.raises(TrainingStopped) as caught, run:
        make(run, *steps)
        run.finish()
    assert not is_finished(run.path)
    return str(caught.value)


def ends(folder: Path) -> None:
    """The same command makes the run whole."""
    with RunDir(folder, CFG) as run:
        make(run, *range(run.resume_step() + 1, 7))
        run.finish()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["loss"]) for record in records] == [(step, step / 7) for step in range(1, 7)]
    assert load_run(folder).finished


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", GROWING)
@pytest.mark.parametrize("step", [3, 5])
def test_a_growing_file_that_changes_is_never_sealed(file: str, damage: str, step: int, tmp_path: Path) -> None:
    """The last words are of the checkpoint that is whole; what they ask for makes the run whole."""
    run = begun(tmp_path / "run", *range(1, step + 1))
    DAMAGES[damage](run.path / file)
    said = stopped(run, *range(step + 1, 7))
    assert f"another program changed {file}" in said
    newest = last_checkpoint(run.path)
    assert newest is not None and newest.name == f"step_{step - 1:06d}"
    try:
        check_run_dir(run.path, CFG)
    except ConfigError as error:  # the last checkpoint vouches for what is gone
        assert f"{run.path} is damaged: {file}" in str(error)
        (left,) = re.findall(r"belongs to no checkpoint|whole up to step \d", said)
        assert left in str(error)
    else:
        assert f"whole up to step {step - 1}: the same command continues" in said
        ends(run.path)


def test_a_change_behind_the_last_seal_is_found_by_the_next_one(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", 1, 2, 3)
    text = (run.path / "metrics.jsonl").read_text()
    (run.path / "metrics.jsonl").write_text(text.replace('"step": 3', '"step": 4'))
    assert "It is whole up to step 2: the same command continues from there" in stopped(run, 4)
    ends(run.path)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["config.yaml", "eval.json", "samples.parquet"])
@pytest.mark.parametrize("again", [False, True], ids=["first attempt", "continued"])
def test_a_file_that_the_process_still_knows_is_written_again(
    file: str, damage: str, again: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = begun(tmp_path / "run", 1, 2, 3)
    with run.replacing("samples.parquet") as writing:
        writing.write_bytes(b"PAR1 12345 PAR1\n" * 9)
    make(run, 4)
    if again:
        run.__exit__(None, None, None)
        run = RunDir(tmp_path / "run", CFG)
        assert run.resume_step() == 4
    whole = (run.path / file).read_bytes()
    DAMAGES[damage](run.path / file)
    with run:
        make(run, 5, 6)
        run.finish()
    assert f"{file} was deleted or changed by another program, and is written again" in caplog.text
    assert file == "eval.json" or (run.path / file).read_bytes() == whole
    assert (run.path / "eval.json").read_text() == '[{"step": 6}]' and load_run(run.path).finished


@pytest.mark.parametrize("at", [0, 2])
def test_a_folder_that_is_put_back_as_it_was_before(at: int, tmp_path: Path) -> None:
    """As a snapshot of it, or an empty one in its place."""
    run = begun(tmp_path / "run", *range(1, at + 1))
    shutil.copytree(run.path, tmp_path / "copy")
    make(run, *range(at + 1, 5))
    shutil.rmtree(run.path)
    (tmp_path / "copy").rename(run.path)
    said = stopped(run, 5, 6)
    assert "another program changed" in said and ("whole up to step 2" in said) == (at == 2)
    ends(run.path)


def a_folder_there(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda folder: shutil.rmtree(folder), "cannot be written any more|was deleted or moved"),
        (lambda folder: folder.rename(folder.with_name("moved")), "cannot be written any more|was deleted or moved"),
        (lambda folder: a_folder_there(folder / "metrics.jsonl"), "cannot be written any more"),
        (lambda folder: a_folder_there(folder / "rollouts.jsonl"), "cannot be written any more"),
    ],
    ids=["deleted", "moved", "a folder for metrics", "a folder for rollouts"],
)
@pytest.mark.parametrize("steps", [(3, 4, 5, 6), (4, 5, 6)], ids=["before a line", "before a line and a checkpoint"])
def test_a_folder_that_goes_ends_the_run_in_words(
    harm: Callable[[Path], object], says: str, steps: tuple[int, ...], tmp_path: Path
) -> None:
    run = begun(tmp_path / "run", *range(1, steps[0]))
    harm(run.path)
    assert re.search(says, stopped(run, *steps))


def test_a_file_that_changes_before_the_first_step_of_a_continued_run(tmp_path: Path) -> None:
    begun(tmp_path / "run", 1, 2, 3).__exit__(None, None, None)
    with RunDir(tmp_path / "run", CFG) as run:  # loads its model now
        (run.path / "metrics.jsonl").write_text("")
        with pytest.raises(ConfigError, match=r"metrics.jsonl has 0 bytes"):
            run.resume_step()


def without_step_3(folder: Path, name: str) -> None:
    lines = (folder / name).read_text().splitlines(keepends=True)
    (folder / name).write_text("".join(line for line in lines if '"step": 3' not in line))


@pytest.mark.parametrize(
    "read", [load_run, lambda folder: check_run_dir(folder, CFG)], ids=["load_run", "the same command"]
)
def test_a_finished_run_has_a_line_of_every_step_whoever_vouches_for_it(
    read: Callable[[Path], Any], tmp_path: Path
) -> None:
    """So one that an earlier version sealed without is not read for whole."""
    run = begun(tmp_path / "run", 1, 2, 3)
    without_step_3(run.path, "metrics.jsonl")
    run._growing.begin("metrics.jsonl")  # as if that was all that was written
    make(run, 4, 5, 6)
    assert "one train line of each of 6 steps (3)" in stopped(run)
    run.last_step = 0
    run.finish()
    with pytest.raises(ConfigError, match=rf"steps \(3\). It is whole up to step 2: delete {DONE}, checkpoints/step_"):
        read(run.path)
    assert state_of(run.path)[0] == "damaged"
