"""What vouches for something is renamed into place when the disk holds all of it, and before anything builds on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from qerl_core.rundir.durable import atomically, make_folder, write_atomically
from qerl_core.rundir.run_dir import RunDir


@pytest.fixture
def events(stand_in: Any) -> list[str]:
    """ "sync NAME" and "rename NAME", with the name that is given, in order."""
    seen: list[str] = []
    sync, replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        seen.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        sync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        seen.append(f"rename {target.name}")
        replace(source, target)

    stand_in(os, fsync=fsync, replace=renamed)
    return seen


def assert_order(events: list[str], *expected: str) -> None:
    places = [events.index(event) for event in expected]
    assert places == sorted(places), events


def run_dir(folder: Path) -> RunDir:
    return RunDir(folder, OmegaConf.create({"steps": 1}))


def test_a_checkpoint_and_what_it_vouches_for(tmp_path: Path, events: list[str]) -> None:
    with run_dir(tmp_path / "run") as run:
        run.log("train", 1, {"loss": 1.0})
        events.clear()
        with run.checkpoint(1) as folder:
            (folder / "adapter").mkdir()
            (folder / "adapter" / "weights").write_text("w")
    renamed = "rename step_000001"
    for synced in ("metrics.jsonl", "seals.jsonl", "run", "weights", "adapter", "manifest.json", ".writing"):
        assert_order(events, f"sync {synced}", renamed)
    assert events[events.index(renamed) + 1 :] == ["sync checkpoints"]


def test_a_file_its_seal_and_its_name(tmp_path: Path, events: list[str]) -> None:
    with run_dir(tmp_path / "run") as run:
        run.log("train", 1, {"loss": 1.0})
        events.clear()
        run.write("eval.json", "{}")
        assert events == ["sync .eval.json.writing", "sync seals.jsonl", "rename eval.json", "sync run"]
        events.clear()
        run.finish()
        assert_order(events, "sync metrics.jsonl", "sync .done.json.writing", "rename done.json")
    events.clear()
    write_atomically(tmp_path / "table.md", "1")
    assert events == ["sync .table.md.writing", "rename table.md", f"sync {tmp_path.name}"]


def test_a_folder_takes_its_place_as_a_whole(tmp_path: Path, events: list[str]) -> None:
    left = tmp_path / ".export.writing"  # by a kill
    left.mkdir()
    (left / "half").touch()
    (tmp_path / "export").mkdir()
    with atomically(tmp_path / "export") as folder:
        folder.mkdir()
        (folder / "weights").write_text("w")
        assert not [*(tmp_path / "export").iterdir()]
    assert events == ["sync weights", "sync .export.writing", "rename export", f"sync {tmp_path.name}"]
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["weights"]


def test_an_error_or_nothing_written_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "table.md").write_text("1")
    with pytest.raises(OSError, match="full"), atomically(tmp_path / "table.md") as writing:
        writing.write_text("half")
        raise OSError("full")
    with atomically(tmp_path / "table.md"):
        pass
    assert (tmp_path / "table.md").read_text() == "1" and len([*tmp_path.iterdir()]) == 1


def test_the_names_of_new_folders(tmp_path: Path, events: list[str]) -> None:
    make_folder(tmp_path / "a" / "b")
    assert events == [f"sync {tmp_path.name}", "sync a"]
    make_folder(tmp_path / "a" / "b")
    assert len(events) == 2
