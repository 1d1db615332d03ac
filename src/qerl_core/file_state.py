"""What tells a file from another one in its place, and from itself before a change, without reading it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from qerl_core.checks import require


class FileState(NamedTuple):
    """A file that took the place of another can have its size and its time of change. Times are in nanoseconds."""

    device: int
    inode: int
    size: int
    written: int
    changed: int


def file_state(path: Path) -> FileState:
    found = path.stat()
    return FileState(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def file_states(paths: Iterable[Path]) -> dict[Path, FileState]:
    """Of these files, and of the files of these folders."""
    files = (file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path]))
    return {file: file_state(file) for file in files if file.is_file()}


def require_unchanged(before: Mapping[Path, FileState]) -> None:
    """Raise ConfigError unless the files are in the states that they had: else a digest would be of one file, and what
    was read of another."""
    for file, state in before.items():
        require(
            file.is_file() and file_state(file) == state,
            f"{file} was changed while it was read. Repeat the command when it is whole",
        )
