"""SIGTERM and SIGHUP, which schedulers and closed terminals send, end a program as Ctrl-C does: `with` blocks close.

Schedulers and terminals send a signal to a whole group while the launcher forwards it, so what comes within REPEAT_S is
one.
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
STEP = "a checkpoint follows this step, then the run stops"
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class Terminated(BaseException):
    """A signal asks this process to end. No Exception, so that only what ends everything catches it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


STOPS = (Terminated, KeyboardInterrupt)


def stop_by(signum: int) -> Terminated | KeyboardInterrupt:
    """What ends a program that got this signal."""
    return KeyboardInterrupt() if signum == signal.SIGINT else Terminated(signum)


_raised: list[int] = []  # signals that ended, or should have ended, the block of `terminations_raise`


@contextmanager
def terminations_raise() -> Iterator[None]:
    """In this block SIGTERM and SIGHUP raise Terminated, and Ctrl-C KeyboardInterrupt, in the main thread."""
    last = -REPEAT_S

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal last
        repeated, last = time.monotonic() - last < REPEAT_S, time.monotonic()
        if not repeated:
            _raised.append(signum)
            raise stop_by(signum)

    try:
        with _handled(SIGNALS, stop):
            yield
    finally:
        _raised.clear()


def raise_again() -> None:
    """Raise what a library has swallowed, as callbacks and imports do; called before new work begins."""
    if _raised and threading.current_thread() is threading.main_thread():
        raise stop_by(_raised.pop())


@contextmanager
def terminations_held() -> Iterator[None]:
    """Signals wait for the end of this block, which would swallow them or fail by them; a second Ctrl-C does not."""
    with terminations_noted(noting=True, says=None) as noted:
        yield
    if noted.signum is not None:
        raise stop_by(noted.signum)


class PendingSignal:
    """The first signal that came in a block of `terminations_noted`, and when; None if none did."""

    signum: int | None = None
    since = 0.0  # time.monotonic()

    def on_any(self, gather: Callable[[int | None], list[int | None]]) -> int | None:
        """The signal that came to any rank so far; all ranks ask, and `gather` what each of them noted."""
        return next(filter(None, gather(self.signum)), None)


@contextmanager
def terminations_noted(noting: bool, says: str | None = STEP) -> Iterator[PendingSignal]:
    """In this block signals are only noted, so that it can end where nothing is lost; a second Ctrl-C ends it at once.

    Without `noting` the block changes nothing. `says` tells a user what follows; None: nothing is said.
    """
    raise_again()
    noted = PendingSignal()

    def note(signum: int, frame: FrameType | None) -> None:
        if noted.signum is None:
            noted.signum, noted.since = signum, time.monotonic()
            asked = signum == signal.SIGINT
            name, more = ("Ctrl-C", "; a second one ends it at once") if asked else (signal.Signals(signum).name, "")
            if says is not None:
                log.info("%s: %s%s", name, says, more)
        elif signum == signal.SIGINT and time.monotonic() - noted.since > REPEAT_S:
            raise KeyboardInterrupt

    with _handled(SIGNALS if noting else (), note):
        yield noted


def end_quietly() -> None:
    """From here on Ctrl-C ends this process at once, without a traceback of what ends with it."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


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
