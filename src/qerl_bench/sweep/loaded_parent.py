"""Starts runs as forks of one process that has imported everything once (`sweep/fork_server.py`).

A run is a process of its own as before, with its environment and its output. What libraries read from the environment
when they are imported is that of the parent, so runs with another environment get another parent. Where a fork is not
safe, or the parent is lost, runs import by themselves again, and a line says why.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from qerl_core.checks import ConfigError
from qerl_core.process.cards import CHOICE
from qerl_core.process.children import STDERR
from qerl_core.process.gpu_share import RUNS_ON_GPU
from qerl_core.process.inherited import without_launcher

log = logging.getLogger(__name__)
SERVES = "QERL_BENCH_SERVES"  # environment variable of a loaded parent: its end of the connection
READ_LATE = (CHOICE, RUNS_ON_GPU)  # variables that nothing reads before a run begins
END_LIMIT_S = 10.0  # for a parent to end when nobody asks any more
FORKED, ENDED, STALE, UNSAFE = "forked", "ended", "stale", "unsafe"  # what a parent answers


def is_loaded_parent() -> bool:
    """Whether a sweep started this process to fork its runs."""
    return SERVES in os.environ


def forks_runs(preload: bool | None, gpus: Sequence[str]) -> bool:
    """Whether runs are forked; None: on Linux, where no GPU is visible. Raises ConfigError if they cannot be."""
    linux = sys.platform == "linux"
    if preload and not linux:
        raise ConfigError(f"hydra.launcher.preload=true needs Linux, this is {sys.platform}; leave it out")
    return linux and not gpus if preload is None else preload


class LoadedParent:
    """A process that imports, and then forks a run for each request."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        from multiprocessing import Pipe  # which other commands do not need

        self._connection, theirs = Pipe()
        options = {"env": {**environment, SERVES: str(theirs.fileno())}, "pass_fds": [theirs.fileno()]}
        with theirs:
            self._process = subprocess.Popen([*command], stdout=STDERR, **options)
        self.pid = self._process.pid
        self.lost = False
        self._codes: dict[int, int] = {}  # of runs that have ended, by pid

    def fork(self, words: Sequence[str], environment: Mapping[str, str], output: Path | None) -> tuple[str, int | str]:
        """FORKED and a pid; or STALE or UNSAFE and why not. Raises EOFError if the parent is lost."""
        try:
            self._connection.send(([*words], dict(environment), None if output is None else str(output)))
            while (answer := self._connection.recv())[0] == ENDED:
                self._codes[answer[1]] = answer[2]
        except OSError as error:  # a connection that is closed at the other end
            raise EOFError from error
        return answer

    def code(self, pid: int) -> int | None:
        """The exit code of a run; None while it runs, and of one whose end nobody saw because the parent is lost."""
        try:
            while not self.lost and self._connection.poll():
                _, ended, code = self._connection.recv()
                self._codes[ended] = code
        except (EOFError, OSError):
            self.lost = True
        return self._codes.get(pid)

    def close(self) -> None:
        self._connection.close()
        try:
            self._process.wait(END_LIMIT_S)
        except BaseException:
            self._process.kill()
            self._process.wait()


class Fork:
    """A run that a parent forked, to be used as a `Child`. One that outlives its parent is left to other processes."""

    def __init__(self, parent: LoadedParent, pid: int) -> None:
        self._parent, self.pid = parent, pid

    def poll(self) -> int | None:
        """The exit code, -N if signal N killed it; None while it runs."""
        code = self._parent.code(self.pid)
        return os.EX_TEMPFAIL if code is None and self._parent.lost else code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)


class Preloaded:
    """The loaded parents of a sweep, one for each environment; use as a context manager."""

    def __init__(self) -> None:
        self._current: dict[frozenset[tuple[str, str]], LoadedParent] = {}
        self._all: list[LoadedParent] = []
        self._refused = False

    def __enter__(self) -> Preloaded:
        return self

    def __exit__(self, *error: object) -> None:
        for parent in self._all:
            parent.close()

    def start(
        self, command: Sequence[str], words: Sequence[str], environment: Mapping[str, str], output: Path | None
    ) -> Fork | None:
        """A run with these `words`, whose parent `command` starts. None if it has to import by itself."""
        environment = without_launcher(environment)
        key = frozenset((name, value) for name, value in environment.items() if name not in READ_LATE)
        while not self._refused and not any(parent.lost for parent in self._all):
            if (parent := self._current.get(key)) is None:
                parent = self._current[key] = LoadedParent(command, environment)
                self._all.append(parent)
            try:
                kind, what = parent.fork(words, environment, output)
            except EOFError:
                parent.lost = True
                break
            if kind == FORKED:
                return Fork(parent, int(what))
            if kind == STALE:
                log.info("the code has changed: it is imported anew for the next runs")
                del self._current[key]
            else:
                self.refuse(str(what))
        if not self._refused:
            self.refuse("the process that had imported for them has ended")
        return None

    def refuse(self, why: str) -> None:
        self._refused = True
        log.warning("from here on each run imports by itself, as with hydra.launcher.preload=false: %s", why)
