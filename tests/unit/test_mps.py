"""MPS for the time of a sweep, with stand-ins for NVIDIA's program and for the process that tries it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qerl_core.checks import ConfigError
from qerl_core.process import mps
from qerl_core.process.mps import PIPES, side_by_side

SERVICE = """#!/usr/bin/env bash
# As the program does: -f serves until it is told to quit, by its other self, through the folder.
cd "$CUDA_MPS_PIPE_DIRECTORY"
if [ "$1" = -f ]; then
    echo "began ${CUDA_VISIBLE_DEVICES-all}" >> "$SEEN"
    %s
    touch control
    while [ ! -e quit ]; do sleep 0.02; done
    echo ended >> "$SEEN"
else
    read -r word && touch "$word"
fi
"""


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the stand-in writes of its life. It is the only program in PATH beside the system's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.setattr(mps, "CLIENT", "")
    serve(tmp_path)
    return tmp_path / "seen"


def serve(folder: Path, first: str = ":") -> None:
    program = folder / mps.CONTROL
    program.write_text(SERVICE % first)
    program.chmod(0o755)


def test_the_service_lives_as_long_as_what_is_inside(seen: Path) -> None:
    with side_by_side(True):
        folder = Path(os.environ[PIPES])
        assert (folder / "control").exists()
        assert seen.read_text() == "began all\n"  # ids of GPUs mean inside what they mean outside
        with side_by_side(True):  # one is enough
            assert Path(os.environ[PIPES]) == folder
    assert seen.read_text() == "began all\nended\n"
    assert PIPES not in os.environ and not folder.exists()


def test_an_error_inside_ends_the_service_too(seen: Path) -> None:
    with pytest.raises(KeyboardInterrupt), side_by_side(True):
        raise KeyboardInterrupt
    assert seen.read_text().endswith("ended\n")


@pytest.mark.parametrize("wanted", [False, True], ids=["not wanted", "chosen by hand"])
def test_nothing_is_started(seen: Path, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if wanted:
        monkeypatch.setenv(PIPES, "/elsewhere")
    with side_by_side(wanted):
        assert os.environ.get(PIPES) == ("/elsewhere" if wanted else None)
    assert not seen.exists()


def test_what_cannot_be_had_is_refused_with_the_reason(seen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "CLIENT", "raise SystemExit('CUDA error 805')")
    with pytest.raises(ConfigError, match=r"CUDA error 805.*mps=true"), side_by_side(True):
        pass
    assert seen.read_text().endswith("ended\n")  # and nothing is left of it
    serve(seen.parent, "exit 3")
    with pytest.raises(ConfigError, match=r"exit code 3.*mps=true"), side_by_side(True):
        pass
    (seen.parent / mps.CONTROL).unlink()
    with pytest.raises(ConfigError, match=rf"mps=true needs {mps.CONTROL}"), side_by_side(True):
        pass
    assert PIPES not in os.environ
