"""What a refusal, and what a failure, leaves of the folder of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.errors import HydraException

from qerl_core.checks import ConfigError, RunLocked, TrainingStopped
from qerl_core.options.composer import Composer
from qerl_core.process.failure import failure_in_log
from qerl_core.rundir.locks import lock
from qerl_core.rundir.refusals import RECORDS, nothing_left_if_refused


def attempt(folder: Path, error: Exception, *files: str) -> None:
    """A run that writes `files` in `folder` and ends by `error`."""
    with pytest.raises(type(error)), nothing_left_if_refused(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("config.yaml", "run.log", *files):
            (folder / name).write_text("new")
        raise error


@pytest.mark.parametrize("error", [ConfigError("no GPU"), HydraException("no option")])
def test_a_refused_new_run_leaves_nothing(tmp_path: Path, error: Exception) -> None:
    (tmp_path / "runs" / "other").mkdir(parents=True)
    attempt(tmp_path / "runs" / "group" / "new", error)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]
    attempt(tmp_path / "elsewhere" / "runs" / "new", error)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize("error", [TrainingStopped("no signal"), ZeroDivisionError(), RunLocked("by another process")])
def test_a_failed_run_keeps_its_folder(tmp_path: Path, error: Exception) -> None:
    attempt(tmp_path / "new", error)
    assert (tmp_path / "new" / "run.log").read_text() == "new"


@pytest.mark.parametrize(("error", "lines"), [(TrainingStopped("no signal"), 1), (RunLocked("by another process"), 0)])
def test_a_run_that_another_process_holds_gets_no_line_in_that_ones_log(
    error: Exception, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(type(error)), failure_in_log():
        raise error
    assert [record.getMessage() for record in caplog.records] == ["failed: no signal"][:lines]


def test_an_earlier_run_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "env.json").write_text("old")
    attempt(tmp_path / "old", ConfigError("no GPU"))
    assert {path.name for path in (tmp_path / "old").iterdir()} == {"env.json", "config.yaml", "run.log"}


@pytest.mark.parametrize("name", RECORDS)
def test_a_run_that_has_begun_keeps_its_folder(tmp_path: Path, name: str) -> None:
    attempt(tmp_path / "new", ConfigError("too long"), name)
    assert (tmp_path / "new" / name).exists()


def test_a_folder_that_another_process_has_taken_meanwhile_is_left_to_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), nothing_left_if_refused(tmp_path / "new"):
        (tmp_path / "new").mkdir()
        held = lock(tmp_path / "new" / ".lock")
        assert held is not None
        raise ConfigError("no GPU")
    held.close()
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize(
    "word",
    [
        "quant={}",
        "lora={}",
        "aqn=[1]",
        "quant=[[nvfp4]]",
        "aqn=[1.5,x]",
        "algo=[null]",
        "model=[true]",
        "eval=[]",
        "task=[{a:1}]",
    ],
)
def test_a_list_or_nothing_where_a_name_belongs_is_answered_with_the_word_to_type(word: str) -> None:
    """Hydra fails for some of them with an error of Python, and passes over others."""
    with pytest.raises(
        ConfigError, match=rf"{word.partition('=')[0]}=[\[{{].*an option is chosen by its name, .*=NAME"
    ):
        Composer().tree([word])
