"""Why a run failed, in one line: the run writes it to run.log, and a sweep reads it there."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qerl_core.checks import ConfigError, RunLocked, TrainingStopped
from qerl_core.process.arguments import whole
from qerl_core.process.termination import STOPS

log = logging.getLogger("qerl_bench.failure")  # conf/run.yaml sends this logger to run.log only
MARK = "failed: "
INTENDED = (ConfigError, TrainingStopped, *STOPS)  # these say enough without a traceback


@contextmanager
def failure_in_log() -> Iterator[None]:
    """Write to run.log what ends this block early, with a traceback if that is a bug.

    Not that the run is another process's, whose log it is.
    """
    try:
        yield
    except RunLocked:
        raise
    except BaseException as error:
        words = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else " ".join(str(error).split())
        intended = isinstance(error, INTENDED)
        kind = "" if intended and words else f"{type(error).__name__}: "
        log.error("%s%s%s", MARK, kind, words, exc_info=not intended)
        raise


def reason_of(run_dir: Path, code: int, offset: int = 0) -> str:
    """Why a run ended with `code`, from what it wrote to run.log behind `offset` or said last in launch.log."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    logged = _text(run_dir / "run.log", offset).splitlines()
    reasons = [line.partition(MARK)[2].strip() for line in logged if MARK in line]
    said = reasons or [line.strip() for line in whole(_text(run_dir / "launch.log", 0)).splitlines()]
    return next(filter(None, reversed(said)), f"exit code {code}")


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _text(path: Path, offset: int) -> str:
    return path.read_bytes()[offset:].decode(errors="replace") if path.exists() else ""
