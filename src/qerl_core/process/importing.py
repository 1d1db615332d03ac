"""What the import of PyTorch and its libraries asks of a process: variables that are read once, and no collections."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disables the garbage collector during imports, and then freezes what they made: a million objects that stay."""
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # libraries report what is left over at the end
        gc.enable()


def set_environment() -> None:
    """Set what libraries read from the environment, some of it when they are imported."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach our own messages, not Hydra's printer
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # OpenMP threads wait actively for microseconds, not milliseconds
    os.environ["RUST_BACKTRACE"] = "0"  # a panic at no memory waits for its own backtrace for ever
