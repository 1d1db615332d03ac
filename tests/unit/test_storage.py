"""A full disk and its relatives: one message that says what is needed, and the same command continues."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build
from qerl_core.checks import ConfigError, TrainingStopped
from qerl_core.exits import exit_in_words
from qerl_core.process.arguments import whole
from qerl_core.rundir.disk_errors import REASONS, failure
from qerl_core.rundir.run_dir import RunDir

if TYPE_CHECKING:
    from conftest import Runs

LARGE = "ulimit -f"
TENSOR, TABLE = torch.zeros(10_000), pd.DataFrame({"a": range(10_000)})
WRITERS: dict[str, Callable[[Path], object]] = {
    "torch": lambda file: torch.save({"a": TENSOR}, file),
    "safetensors": lambda file: save_file({"a": TENSOR}, file),
    "pyarrow": TABLE.to_parquet,
    "python": lambda file: file.write_text("1" * 10_000),
}


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses to let a file grow beyond `size` bytes, with EFBIG, as a full disk does with ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_every_library_that_writes_is_understood(tmp_path: Path) -> None:
    reasons = {}
    for name, write in WRITERS.items():
        with files_of_at_most(1_000), pytest.raises(Exception) as caught:
            write(tmp_path / name)
        reasons[name] = failure(caught.value)
    assert reasons.pop("torch") == "a file of the checkpoint could not be written, as when the disk is full"
    assert all(LARGE in str(reason) for reason in reasons.values()), reasons


def test_a_file_that_torch_cannot_open_has_the_reason_that_it_says() -> None:
    said = "[enforce fail at inline_container.cc:747] . open file failed with strerror: "
    assert failure(RuntimeError(said + os.strerror(errno.ENOSPC))) == REASONS[errno.ENOSPC]
    assert failure(RuntimeError(said + os.strerror(errno.ENOENT))) is None


def test_other_errors_are_none_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"PK\x03\x04" + b"0" * 100)
    with pytest.raises(RuntimeError) as caught:
        torch.load(tmp_path / "a.pt", weights_only=True)
    assert failure(caught.value) is None
    assert failure(FileNotFoundError(errno.ENOENT, "none", "x")) is None and failure(RuntimeError("28")) is None


def test_a_failure_behind_another_error_is_found() -> None:
    error = ValueError("cannot write")
    error.__cause__ = OSError(errno.EROFS, "read-only", "/place/file")
    assert failure(error) == "the file system is read-only: /place/file"
    error.__cause__.__cause__ = error  # a circle ends
    assert failure(RuntimeError()) is None


@pytest.mark.usefixtures("no_figures")
def test_a_run_without_room_stops_in_words_and_continues(runs: Runs, tmp_path: Path) -> None:
    """Each limit is met by another file, in another library; in the end the numbers are those of a run with room."""
    config = OmegaConf.merge(runs.config, {"root": str(tmp_path)})
    folder = tmp_path / "runs" / "run"
    steps = []
    for limit in (300, 8_000, 15_000, 25_000):
        with files_of_at_most(limit), pytest.raises(TrainingStopped) as caught:
            run_experiment(build(config), config)
        message = str(caught.value)
        assert str(folder) in message and "MiB" in message and "the same command continues from step" in message
        steps.append(int(message.rpartition(" ")[2]))
    run_experiment(build(config), config)
    assert steps == [0, 0, 0, 0]
    assert runs.numbers(folder) == runs.numbers(runs.finished)


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(("words", "further"), [([], [2, 1]), (["checkpoints.keep=1"], [1, 1]), (["save_every=3"], [])])
def test_a_run_warns_after_a_checkpoint_if_those_to_come_do_not_fit(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    words: list[str], further: list[int],
) -> None:  # fmt: skip
    config = OmegaConf.merge(
        runs.config, {"root": str(tmp_path), "steps": 3, "save_every": 1}, OmegaConf.from_dotlist(words)
    )
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1_000))
    run_experiment(build(config), config)
    said = [record.getMessage() for record in caplog.records if "checkpoints to come" in record.getMessage()]
    assert [int(one.partition("(")[2].partition(")")[0]) for one in said] == further


def test_outside_of_a_run_the_command_line_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, exit_in_words("stopped"):
        (tmp_path / ("x" * 300)).mkdir()
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error: the name is too long") and "xxx" in error and "Traceback" not in error
    with pytest.raises(ZeroDivisionError), exit_in_words("stopped"):
        print(1 / 0)


@pytest.mark.parametrize("library", ["python", "torch", "safetensors", "pyarrow"])
def test_a_working_folder_that_is_deleted_ends_in_one_line(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here" / "runs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    shutil.rmtree(tmp_path / "here")
    with pytest.raises(SystemExit) as caught, exit_in_words("stopped"):
        WRITERS[library](Path("runs", "file"))
    assert caught.value.code == 1
    (line,) = whole(capsys.readouterr().err).splitlines()
    assert line.startswith("error: the working folder has been deleted") and "repeat the command" in line


def test_the_deleted_folder_of_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, exit_in_words("stopped"):
        (tmp_path / "runs" / "metrics.jsonl").write_text("")
    (line,) = whole(capsys.readouterr().err).splitlines()
    assert caught.value.code == 1 and str(tmp_path / "runs") in line and "repeat the command" in line
    with pytest.raises(FileNotFoundError), exit_in_words("stopped"):
        (tmp_path / "a file that a bug looks for").read_text()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("/sys is of Linux")
    with pytest.raises((TrainingStopped, ConfigError), match="/sys/kernel"):
        RunDir(Path("/sys/kernel/runs/x"), OmegaConf.create({"steps": 1}))
