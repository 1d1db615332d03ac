"""Attempts at a run: the command line itself, in a forked copy of this process, which has imported everything already.

So an attempt costs what its steps cost, and anything may be done to its process.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from qerl_bench.parallel import World
from qerl_core.process.arguments import whole

LIMIT_S = 180.0  # for one attempt: a run of the campaign takes one to two seconds of an idle core
Sabotage = Callable[[], object]


@dataclass(frozen=True)
class Ended:
    """How an attempt ended: its exit code, -N if signal N ended it, and what it printed."""

    code: int
    said: str

    @property
    def hung(self) -> bool:
        return self.said.endswith(HUNG)

    @property
    def words(self) -> str:
        """The last line that was printed, which is the message of a program that refuses."""
        lines = [line for line in whole(self.said).splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""


HUNG = f"hung for {LIMIT_S:g} s\n"


class Attempt:
    """`qerl-bench WORDS...`, started. `sabotage` is called in its process before the command."""

    def __init__(self, words: list[str], sabotage: Sabotage | None = None) -> None:
        self.output = tempfile.TemporaryFile()  # noqa: SIM115
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(_run(words, sabotage, self.output.fileno()))

    def send(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def poll(self) -> int | None:
        """The status of the process if it has ended, as os.waitpid gives it."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return status if pid else None

    def wait(self) -> Ended:
        end = time.monotonic() + LIMIT_S
        hung = ""
        while (status := self.poll()) is None:
            if time.monotonic() > end and not hung:
                self.send(signal.SIGKILL)
                hung = HUNG
            time.sleep(0.005)
        self.output.seek(0)
        said = self.output.read().decode(errors="replace")
        self.output.close()
        return Ended(os.waitstatus_to_exitcode(status), said + hung)


def attempt(words: list[str], sabotage: Sabotage | None = None) -> Ended:
    return Attempt(words, sabotage).wait()


def _run(words: list[str], sabotage: Sabotage | None, output: int) -> int:
    """What the forked process does; returns its exit code."""
    from qerl_bench.__main__ import main

    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has the campaign ignore
        sys.argv = ["qerl-bench", *words]
        if sabotage is not None:
            sabotage()
        code = main(words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            code = code or 120  # as Python does
    return code


def preload(modules: Iterable[str]) -> None:
    """Import modules, so that forked processes need not."""
    import importlib

    from qerl_core.process.hidden_packages import hidden_packages

    with hidden_packages():
        for name in modules:
            if name not in sys.modules and name != "__main__":
                try:
                    importlib.import_module(name)
                except Exception:  # such as six.moves, which exists only inside of another
                    continue


def write_modules(path: Path) -> None:
    """To be called in an attempt: at its end write the names of all modules that it has imported to `path`."""
    import qerl_bench.commands.run as command

    run = command.run

    def then(world: World, single: bool) -> None:
        run(world, single)
        path.write_text("\n".join(sys.modules))

    command.run = then
