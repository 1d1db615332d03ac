"""A refusal leaves nothing behind: the folder of a new run goes with it. Failed and earlier runs keep theirs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from qerl_core.checks import ConfigError, RunLocked
from qerl_core.rundir.checksums import DONE
from qerl_core.rundir.locks import lock

CODE = 2  # exit code of a program that was refused
REFUSALS = (ConfigError, HydraException, OmegaConfBaseException)
RECORDS = ("metrics.jsonl", "eval.json", "checkpoints", DONE)  # a run with one of these has begun


@contextmanager
def nothing_left_if_refused(path: Path) -> Iterator[None]:
    """Delete `path`, and the folders above that were made for it, if this block refuses what it is made for: the folder
    of a new run, or the file with the grid of a sweep.

    What was there before is left as it is.
    """
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    except REFUSALS as error:
        if path in made and not isinstance(error, RunLocked):
            if path.is_file():
                path.unlink()
            discard(path)
            with suppress(OSError):  # not empty: another run is there
                for folder in made[1:]:
                    folder.rmdir()
        raise


def discard(path: Path) -> None:
    """Delete the folder of a run that was refused, unless another process holds its lock or has begun the run."""
    if not path.is_dir() or (held := lock(path / ".lock")) is None:
        return
    with held:
        if not any((path / name).exists() for name in RECORDS):
            shutil.rmtree(path)
