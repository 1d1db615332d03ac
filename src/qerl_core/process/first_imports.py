"""Ctrl-C while a program imports what it consists of. Imports nothing that takes time itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOPPED = b"stopped; nothing was begun\n"


@contextmanager
def ends_in_a_line() -> Iterator[None]:
    """In this block Ctrl-C ends the process with one line and code 130, unless a program has its own handler.

    No exception is raised: what is half imported may turn it into another one.
    """

    def end(*_: object) -> None:
        os.write(2, STOPPED)
        os._exit(128 + signal.SIGINT)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    try:
        signal.signal(signal.SIGINT, end)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
