"""Locks of run directories. The lock file says who holds it. The lock ends with its process, whatever ends that."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import platform
import time
from pathlib import Path
from typing import IO

from qerl_bench.checks import ConfigError, TrainingStopped

log = logging.getLogger(__name__)
WAIT_LIMIT_S = 3600.0
TELL_EVERY_S = 60.0


class RunLocked(ConfigError):
    """Another process is running in the folder of a run."""


def lock(path: Path) -> IO[str] | None:
    """Lock the file `path` until it is closed. None if another process has locked it."""
    file = open(path, "a")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    file.truncate(0)
    file.write(f"{platform.node()}, pid {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file


def holder(path: Path) -> str | None:
    """Host, process and time of the lock of the file `path`; None without a lock."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return path.read_text().strip() or "an unknown process"
    except FileNotFoundError:
        pass
    return None


def wait_for_lock(path: Path, what: str) -> IO[str]:
    """Lock the file `path`, after a wait for the process that holds it, whose work is `what`. It is told every minute.

    Raises TrainingStopped after WAIT_LIMIT_S.
    """
    started, told = time.monotonic(), -math.inf
    while (held := lock(path)) is None:
        waited, who = time.monotonic() - started, holder(path)
        if waited > WAIT_LIMIT_S:
            raise TrainingStopped(
                f"{what} has not ended in {WAIT_LIMIT_S / 3600:g} hours ({who}): stop that process, and start again"
            )
        if who and waited - told >= TELL_EVERY_S:
            log.info("waiting for %s: %s", what, who)
            told = waited
        time.sleep(0.2)
    return held
