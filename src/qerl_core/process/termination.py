"""SIGTERM and SIGHUP, which schedulers and closed terminals send, end a program as Ctrl-C does: `with` blocks close.

Schedulers often send a signal to a whole group while the launcher forwards it, so what comes within REPEAT_S is one.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)
REPEAT_S = 1.0
SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Terminated(BaseException):
    """A signal asks this process to end. No Exception, so that only what ends everything catches it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextmanager
def terminations_raise() -> Iterator[None]:
    """In this block SIGTERM and SIGHUP raise Terminated, and Ctrl-C KeyboardInterrupt, in the main thread."""
    last = -REPEAT_S

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal last
        repeated, last = time.monotonic() - last < REPEAT_S, time.monotonic()
        if not repeated:
            raise KeyboardInterrupt if signum == signal.SIGINT else Terminated(signum)

    with _handled((*SIGNALS, signal.SIGINT), stop):
        yield


class PendingSignal:
    """The signal that came in a block of `terminations_noted`; None if none did."""

    signum: int | None = None

    def on_any(self, gather: Callable[[int | None], list[int | None]]) -> int | None:
        """The signal that came to any rank so far; all ranks ask, and `gather` what each of them noted."""
        return next(filter(None, gather(self.signum)), None)


@contextmanager
def terminations_noted(noting: bool) -> Iterator[PendingSignal]:
    """In this block SIGTERM and SIGHUP are only noted, so that it can end where nothing is lost. Ctrl-C is not.

    Without `noting` the block changes nothing.
    """
    noted = PendingSignal()

    def note(signum: int, frame: FrameType | None) -> None:
        if noted.signum is None:
            log.info("%s: a checkpoint follows this step, then the run stops", signal.Signals(signum).name)
        noted.signum = signum

    with _handled(SIGNALS if noting else (), note):
        yield noted


@contextmanager
def _handled(signals: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle `signals`, except for those that the starter of this program wants ignored, as nohup does with SIGHUP."""
    if threading.current_thread() is not threading.main_thread():  # Python handles signals in the main thread only
        yield
        return
    before = {number: signal.getsignal(number) for number in signals}
    before = {number: old for number, old in before.items() if old is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
