"""`qerl-bench` and `python` for tests that type commands: forks of a process that has imported everything.

The two are programs with streams, signals and exit codes of their own, and so are the children that they start. They
begin without the ten seconds that imports take. Whether the package imports what it needs, they cannot tell:
tests/e2e/test_artifact.py and test_wheel.py start the interpreter.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Lock, Thread

import qerl_studies.figures.run as figures
from qerl_core.process.children import PARENT
from tests.parallel.ranks import finish, forkserver
from tests.parallel.threads import one_thread

UNDRAWN = (
    "RUNS_OF_TESTS_DRAW_NOTHING"  # set in the environment of either: figures take longer than steps of a tiny model
)
_starting = Lock()
# Python without our program, or one of the tests, is the interpreter itself.
CLIENT = f"""#!{sys.executable} -SE
import json, os, signal, socket, sys
words = {{first}} + sys.argv[1:]
if not (words[0].endswith("run.py") or words[0] == "-m" and words[1].startswith(("qerl_bench", "tests."))):
    os.execv({sys.executable!r}, [{sys.executable!r}, *words])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
    link.connect({{address!r}})
    told = [words, os.getcwd(), dict(os.environ), {{python!r}}]
    passed = [0, 1, 2] + [int(os.environ[name]) for name in [{PARENT!r}] if name in os.environ]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: link.send(bytes([number])))
    socket.send_fds(link, [json.dumps(told).encode()], passed)
    code = int(link.recv(16))
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextmanager
def served(folder: Path) -> Iterator[None]:
    """In this block both programs, which are written to `folder`, work."""
    address = f"\0{folder}"
    for name, first in (("python", []), ("qerl-bench", ["-m", "qerl_bench"])):
        (folder / name).write_text(CLIENT.format(first=first, address=address, python=str(folder / "python")))
        (folder / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        accepting = Thread(target=_accept, args=[listener], daemon=True)
        accepting.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()


def _accept(listener: socket.socket) -> None:
    with suppress(OSError):  # it was shut down
        while True:
            link, _ = listener.accept()
            Thread(target=_answer, args=[link], daemon=True).start()


def _answer(link: socket.socket) -> None:
    """Pass the client's signals on to its fork, which ends with it, and the exit code back."""
    with link, suppress(ConnectionError):
        told, descriptors, *_ = socket.recv_fds(link, 1 << 20, 4)
        streams = [Connection(descriptor) for descriptor in descriptors]  # which another process can be given
        with _starting:
            fork = forkserver().Process(target=_program, args=[*json.loads(told), streams], daemon=True)
            fork.start()
        for stream in streams:
            stream.close()
        while fork.sentinel not in wait([link, fork.sentinel]):
            number = link.recv(1)
            os.kill(fork.pid or 0, number[0]) if number else fork.kill()
        with _starting:  # which asks all others whether they have ended; only one may read the code
            fork.join()
        link.send(str(fork.exitcode).encode())


def _program(
    words: list[str], folder: str, environment: dict[str, str], python: str, streams: list[Connection]
) -> None:
    for number, stream in zip((0, 1, 2), streams, strict=False):
        os.dup2(stream.fileno(), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if streams[3:]:
        os.environ[PARENT] = str(os.dup(streams[3].fileno()))
    sys.executable = python
    one_thread()
    if UNDRAWN in environment:
        figures.run_figures = lambda folder: None
    module, sys.argv = (words[1], words[1:]) if words[0] == "-m" else (None, words)

    def program() -> int:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
        return 0

    finish(program)
