"""Files that survive a power loss: what vouches for something is renamed into place when that is on the disk."""

from __future__ import annotations

import os
from pathlib import Path


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


def make_folder(path: Path) -> None:
    """Make a folder and its parents, and sync their names."""
    missing = [folder for folder in (path, *path.absolute().parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync(folder.parent)
