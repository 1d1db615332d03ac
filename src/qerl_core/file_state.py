"""What tells a file from another one in its place, and from itself before a change, without reading it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from qerl_core.checks import require

State = tuple[int, ...]


def file_state(path: Path) -> State:
    """Device, inode, size and both times: a file that took its place can have its size and its time of change."""
    state = path.stat()
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


def file_states(paths: Iterable[Path]) -> dict[Path, State]:
    """Of these files, and of the files of these folders."""
    files = (file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path]))
    return {file: file_state(file) for file in files if file.is_file()}


def require_unchanged(before: Mapping[Path, State]) -> None:
    """Raise ConfigError unless the files are in the states that they had: else a digest would be of one file, and what
    was read of another."""
    for file, state in before.items():
        require(
            file.is_file() and file_state(file) == state,
            f"{file} was changed while it was read. Repeat the command when it is whole",
        )
