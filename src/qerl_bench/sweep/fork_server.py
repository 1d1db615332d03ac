"""The process that imports everything once and then forks the runs of a sweep, before any of them computes.

Threads do not survive a fork, and a CUDA that has begun works in no child. So this process computes nothing; before the
first fork it looks whether an import has started either, and refuses to fork if so. Signals wait here while it lives,
and reach the runs; it ends with the connection, and its runs, which watch it as any child, end with it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import numpy
from omegaconf import OmegaConf

from qerl_bench.config import build
from qerl_bench.eval.untrained import installed
from qerl_bench.sweep.loaded_parent import ENDED, FORKED, SERVES, STALE, UNSAFE
from qerl_core.options.composer import Composer
from qerl_core.process.arguments import printable
from qerl_core.process.children import PARENT
from qerl_core.process.hidden_packages import hidden_packages
from qerl_core.process.importing import set_environment, uncollected
from qerl_core.process.termination import SIGNALS
from qerl_core.rundir.environment import code_digest, versions

POLL_S = 0.05
LATER = (  # what a run imports when it is at its tables and figures
    *("qerl_studies.tables.terminal", "qerl_studies.figures.run", "pyarrow.dataset", "pyarrow.pandas_compat"),
    *("matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg"),
)
FORKS_WELL = {"jemalloc_bg_thd"}  # threads of libraries that handle forks by themselves: the allocator of PyArrow
CUDA_NOT_BEGUN = 3  # CUDA_ERROR_NOT_INITIALIZED


def serve(run: Callable[[list[str]], int]) -> NoReturn:
    """Fork a process for each request, which calls `run` with its words and ends, until the launcher is gone."""
    connection = Connection(int(os.environ.pop(SERVES)))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    code = code_digest()  # of what is about to be imported
    load()
    why_not = unsafe()
    running: dict[int, int] = {}  # pid of each run -> the end of a pipe that closes with this process
    while True:
        for pid in [*running]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                os.close(running.pop(pid))
                with suppress(OSError):
                    connection.send((ENDED, pid, os.waitstatus_to_exitcode(status)))
        try:
            if not connection.poll(POLL_S):
                continue
            words, environment, output = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        if why_not is not None:
            connection.send((UNSAFE, why_not))
        elif code_digest() != code:
            connection.send((STALE, ""))
        else:
            theirs, mine = os.pipe()
            if (pid := fork()) == 0:
                connection.close()
                for other in (mine, *running.values()):
                    os.close(other)
                begin(words, {**environment, PARENT: str(theirs)}, output)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                end(partial(run, words))
            os.close(theirs)
            running[pid] = mine
            connection.send((FORKED, pid))


def load() -> None:
    """Import what runs import, in their order and surroundings: of options those of a run without words."""
    set_environment()
    versions()  # of the packages that are loaded now
    installed()
    with uncollected():
        build(OmegaConf.create(Composer().tree([])))
        with hidden_packages():
            import_module("qerl_bench.experiment")
        for name in LATER:
            import_module(name)


def fork() -> int:
    with warnings.catch_warnings():  # Python 3.12 warns of threads, which `unsafe` knows
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def begin(words: Sequence[str], environment: Mapping[str, str], output: str | None) -> None:
    """Make this process what it were if it had been started with these words, environment and output."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv += words
    if output is not None:
        file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
    numpy.random.seed()  # as its import does; Python reseeds its own, and PyTorch begins with a constant


def end(run: Callable[[], int]) -> NoReturn:
    """End this process with the code of `run` as Python ends, but for freeing each object, which would copy what this
    process shares with its parent."""
    try:
        code: object = run()
    except SystemExit as error:
        code = error.code
        if not isinstance(code, int | None):
            print(printable(str(code)), file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as multiprocessing does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)


def unsafe() -> str | None:
    """Why runs cannot be forked from this process; None if they can."""
    if cuda_began():
        return "an import has started CUDA"
    if (pid := fork()) == 0:  # before which OpenBLAS ends its threads, which begin again when they are needed
        os._exit(0)
    os.waitpid(pid, 0)
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    left = len(names) - 1 - len(FORKS_WELL.intersection(names))
    return f"an import has started {left} threads ({', '.join(names)})" if left else None


def cuda_began() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:  # is not loaded
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_NOT_BEGUN
