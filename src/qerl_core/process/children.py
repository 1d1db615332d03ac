"""Starts runs in processes of their own that end with this one, however it ends.

A child holds one end of a pipe. Its other end closes when this process ends, be it by kill -9, and the child then sends
itself SIGTERM. What it prints is no result of this process: it goes to stderr, unless `stdout` says otherwise.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Collection
from typing import Any, Protocol

from qerl_core.process.inherited import without_launcher

PARENT = "QERL_BENCH_PARENT"  # environment variable of a child: its end of the pipe
_watched = threading.Event()  # set in a child
STDERR = 2
STOP_LIMIT_S = 600.0  # for a child to end after a signal, which may wait for a step and a checkpoint


class Stoppable(Protocol):
    """A process that this one, or one on its behalf, has started."""

    def poll(self) -> int | None: ...

    def send_signal(self, signum: int) -> None: ...


class Child:
    """A process of this program; `words` are the whole command."""

    def __init__(self, words: list[str], environment: dict[str, str] | None = None, **options: Any) -> None:
        end, self._mine = os.pipe()
        environment = {**without_launcher(os.environ if environment is None else environment), PARENT: str(end)}
        try:
            options = {"stdout": STDERR, **options}
            self._process = subprocess.Popen(words, env=environment, pass_fds=[end], **options)
        except BaseException:
            os.close(self._mine)
            raise
        finally:
            os.close(end)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, -N if signal N killed it; None while it runs."""
        code = self._process.poll()
        if code is not None and self._mine >= 0:
            os.close(self._mine)
            self._mine = -1
        return code

    def send_signal(self, signum: int) -> None:
        self._process.send_signal(signum)


def wait(child: Child) -> int:
    """The exit code of `child`. If this process is interrupted meanwhile, the child is stopped first."""
    try:
        while (code := child.poll()) is None:
            time.sleep(0.1)
        return code
    except BaseException as error:
        stop([child], signal_of(error))
        raise


def signal_of(error: BaseException) -> int:
    """The signal to send to children because of `error`: the one that this process got, or SIGTERM.

    Ctrl-C is passed on as SIGTERM: a terminal sends it to children too, and a second one ends them without a
    checkpoint.
    """
    return getattr(error, "signum", signal.SIGTERM)


def stop(children: Collection[Stoppable], signum: int, limit_s: float = STOP_LIMIT_S) -> None:
    """Send a signal to `children` and wait until they have ended; kill those that do not within the limit.

    A second interruption kills them at once.
    """
    for child in children:
        child.send_signal(signum)
    end = time.monotonic() + limit_s
    try:
        while any([child.poll() is None for child in children]) and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        for child in children:
            if child.poll() is None:
                child.send_signal(signal.SIGKILL)


def is_child() -> bool:
    """Whether another process of this program started this one, and reports for both."""
    return _watched.is_set()


def end_with_parent() -> None:
    """Have SIGTERM sent to this process when the one that started it as a `Child` ends. Nothing for other processes."""
    end = os.environ.pop(PARENT, None)
    if end is None:
        return

    def watch(end: int) -> None:
        os.read(end, 1)  # returns when the other end closes
        os.kill(os.getpid(), signal.SIGTERM)

    _watched.set()
    threading.Thread(target=watch, args=[int(end)], daemon=True, name="parent watch").start()
