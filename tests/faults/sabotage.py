"""What is done to the process of an attempt: it is killed, its disk fails, its power goes, its clock jumps, ...

File operations are counted by an audit hook, which Python calls just before each of them; what C libraries write
comes between two of them, and is cut by `killed_at_size`.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from sys import addaudithook
from typing import Any

OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def on_operations(root: Path, act: Callable[[str, tuple[Any, ...]], None]) -> None:
    """Call `act` with event and arguments before every operation of this process that changes a file below `root`."""
    inside = [False]  # `act` may use files itself

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in OPERATIONS or inside[0]:
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITES):
            return
        path = arguments[0]
        if isinstance(path, (str, bytes, os.PathLike)) and os.path.abspath(os.fsdecode(path)).startswith(f"{root}/"):
            inside[0] = True
            try:
                act(event, arguments)
            finally:
                inside[0] = False

    addaudithook(hook)


def count_operations(root: Path, to: Path) -> None:
    """Write to `to` how many operations there were, after each."""
    count = [0]

    def act(event: str, arguments: tuple[Any, ...]) -> None:
        count[0] += 1
        to.write_text(str(count[0]))

    on_operations(root, act)


def at_operation(root: Path, number: int, do: Callable[[], object]) -> None:
    """Call `do` before operation `number`."""
    count = [0]

    def act(event: str, arguments: tuple[Any, ...]) -> None:
        count[0] += 1
        if count[0] == number:
            do()

    on_operations(root, act)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at_operation(root: Path, number: int) -> None:
    at_operation(root, number, killed)


def failing_from_operation(root: Path, number: int, code: int, times: int) -> None:
    """Operation `number` and all later ones, `times` at most, fail as with the error `code` of the kernel."""
    count = [0]

    def act(event: str, arguments: tuple[Any, ...]) -> None:
        count[0] += 1
        if number <= count[0] < number + times:
            raise OSError(code, os.strerror(code), os.fsdecode(arguments[0]))

    on_operations(root, act)


def failing_sync(number: int) -> None:
    """The disk does not answer when data is to be synced for the `number`-th time."""
    count, sync = [0], os.fsync

    def fsync(descriptor: int) -> None:
        count[0] += 1
        if count[0] == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    os.fsync = fsync


def killed_at_size(size: int) -> None:
    """The process dies in the middle of the write that would make a file larger than `size` bytes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def files_of_at_most(size: int) -> None:
    """A write that would make a file larger than `size` bytes fails."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def memory_of_at_most(more: int) -> None:
    """The process may map `more` bytes in addition to what it has mapped; tokenizers start 64 threads, and panic."""
    os.environ |= {"RAYON_NUM_THREADS": "64", "RUST_BACKTRACE": "1"}
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def power_lost_at_operation(root: Path, number: int, seed: int) -> None:
    """Kill the process, and leave of its files what a disk must hold after a power loss.

    What was written since the last fsync of a file is lost, a part of it at random. A name that was made, or given to
    another file, since the last fsync of its folder is back as it was, or not, at random. Left out: losses in the
    middle of a file, and deletions that are taken back.
    """
    draw = random.Random(seed)
    synced: dict[int, int] = {}  # by inode
    pending: list[tuple[str, Path, Path | None, Path | None]] = []  # kind, path, its source, its old content
    fsync = os.fsync
    keep = root.parent / f"{root.name}.old"
    keep.mkdir()
    for path in root.rglob("*"):
        synced[path.stat().st_ino] = path.stat().st_size
    count = [0]

    def syncing(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size
        folder = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        pending[:] = [entry for entry in pending if entry[1].parent != folder]

    def lose() -> None:
        for kind, path, source, old in reversed(pending):
            if draw.random() < 0.5 or not path.exists():
                continue
            if kind == "made":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            elif source is not None and source.parent.exists():
                os.rename(path, source)
                if old is not None:
                    os.rename(old, path)
        for path in root.rglob("*"):
            if path.is_file() and (size := path.stat().st_size) > (safe := synced.get(path.stat().st_ino, 0)):
                os.truncate(path, draw.choice((safe, draw.randint(safe, size))))
        shutil.rmtree(keep, ignore_errors=True)
        killed()

    def act(event: str, arguments: tuple[Any, ...]) -> None:
        count[0] += 1
        if count[0] == number:
            lose()
        path = Path(os.path.abspath(os.fsdecode(arguments[0])))
        if event == "os.rename":
            target, old = Path(os.path.abspath(os.fsdecode(arguments[1]))), None
            if target.is_file():
                old = keep / str(count[0])
                os.link(target, old)
            pending[:] = [entry for entry in pending if entry[1] != path]  # a new name, then another name
            pending.append(("renamed", target, path, old))
        elif event == "os.mkdir" or (event == "open" and not path.exists()):
            pending.append(("made", path, None, None))
        elif event == "os.truncate" or (event == "open" and arguments[2] & os.O_TRUNC):
            inode, length = path.stat().st_ino, arguments[1] if event == "os.truncate" else 0
            synced[inode] = min(synced.get(inode, 0), length)

    os.fsync = syncing
    on_operations(root, act)


def clock_jumping(root: Path, number: int, seconds: float) -> None:
    """From operation `number` on the clock of the wall is `seconds` ahead; negative for behind."""
    clock, ahead = time.time, [0.0]
    time.time = lambda: clock() + ahead[0]
    at_operation(root, number, lambda: ahead.__setitem__(0, seconds))
