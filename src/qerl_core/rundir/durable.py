"""Files that survive a power loss: a checkpoint or done.json is renamed into place when all files that it seals are on
the disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qerl_core.checks import require
from qerl_core.process.arguments import unwritable


def check_new_folder(out: Path) -> None:
    """Raise ConfigError unless `out` is a new or empty folder, to which something can be written."""
    require(
        not out.exists() or (out.is_dir() and not any(out.iterdir())),
        f"out={out} exists and is not an empty folder; choose a new one, since nothing is overwritten",
    )
    reason = unwritable(out)
    require(reason is None, f"cannot write to out={out}: {reason}; choose another folder")


def sync(path: Path) -> None:
    """Return when the disk holds the content of a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """`sync` for a folder and all that is in it."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def replace(source: Path, target: Path) -> None:
    """Rename `source`, which is synced, to `target` in the same file system, and sync the name."""
    os.replace(source, target)
    sync(target.parent)


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """A path to write a file or a folder to, which takes the place of `path` when the disk holds it.

    After an error, or if nothing was written, `path` is as it was. A folder replaces an empty folder only. Left out:
    two processes that write the same path, for which there are locks.
    """
    writing = path.with_name(f".{path.name}.writing")
    remove(writing)  # what a kill has left
    try:
        yield writing
        if writing.exists():
            sync_tree(writing)
            replace(writing, path)
    finally:
        remove(writing)


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that `path` holds either all of its old content or all of the new."""
    with atomically(path) as writing:
        writing.write_text(text)


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, and sync their names."""
    missing = [folder for folder in (path, *path.absolute().parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync(folder.parent)
