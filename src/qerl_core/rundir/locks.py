"""Locks of run directories: one process at a time, on one machine or on several that share a file system.

Two guards hold together, because neither is enough:

- flock ends with its process, whatever ends that. On network file systems it may be missing, or hold on one machine
  only, without a word (Lustre with localflock, BeeGFS as installed, NFS with nolock).
- A lease (lease.py), a small file that its holder renews, holds between machines, but outlives a killed process.

So the flock decides between processes of one machine, and the lease between machines.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import platform
import time
from pathlib import Path
from types import TracebackType
from typing import IO

from qerl_core.checks import TrainingStopped
from qerl_core.rundir.lease import Lease, holder_elsewhere

log = logging.getLogger(__name__)
WAIT_LIMIT_S = 3600.0
TELL_EVERY_S = 60.0
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class Lock:
    """A locked file, until `close` or the end of the process."""

    def __init__(self, file: IO[str], lease: Lease) -> None:
        self._file, self._lease = file, lease

    def close(self) -> None:
        self._lease.end()
        self._file.close()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()


def lock(path: Path) -> Lock | None:
    """Lock the file `path`. None if another process has locked it, here or on another machine."""
    file = open(path, "a")  # noqa: SIM115
    try:
        alone = flock(file, fcntl.LOCK_EX)
        if alone is False:
            file.close()
            return None
        if alone is None:
            log.warning(
                "the file system of %s has no locks (flock): a lease guards the run instead, which a killed process "
                "leaves behind for two minutes",
                path.parent,
            )
        words = f"{platform.node()}, pid {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        lease = Lease.take(path, words, alone=alone is True)
        if lease is None:
            file.close()
            return None
        file.truncate(0)
        file.write(f"{words}\n")
        file.flush()
    except OSError:
        file.close()
        raise
    return Lock(file, lease)


def flock(file: IO[str], kind: int) -> bool | None:
    """Whether this process got the lock; None on a file system without locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return None
    return True


def holder(path: Path) -> str | None:
    """Host, process and time of the lock of the file `path`; None without a lock."""
    try:
        with open(path) as file:
            free = flock(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return None
    if free is False:
        return path.read_text().strip() or "an unknown process"
    return holder_elsewhere(path, alone=free is True)


def wait_for_lock(path: Path, what: str, limit_s: float = WAIT_LIMIT_S) -> Lock:
    """Lock the file `path`, after a wait for the process that holds it, whose work is `what`. It is told every minute.

    Raises TrainingStopped after `limit_s`.
    """
    started, told = time.monotonic(), -math.inf
    while (held := lock(path)) is None:
        waited, who = time.monotonic() - started, holder(path)
        if waited > limit_s:
            raise TrainingStopped(
                f"{what} has not ended in {limit_s / 3600:g} hours ({who}): stop that process, and start again"
            )
        if who and waited - told >= TELL_EVERY_S:
            log.info("waiting for %s: %s", what, who)
            told = waited
        time.sleep(0.2)
    return held
