"""Runs in several processes, forked from one that has imported everything; variables and store are as torchrun's."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from qerl_core.process.arguments import whole

LIMIT_S = 600.0  # for a rank that hangs
Sabotage = Callable[[int], object]  # called in each process with its rank, before the command


@dataclass(frozen=True)
class Ended:
    """How a run ended: the exit code of each rank, -N if signal N ended it, and what all have printed."""

    codes: list[int | None]
    said: str


def run(words: Sequence[str], size: int, output: Path, sabotage: Sabotage | None = None, command: str = "run") -> Ended:
    """`qerl-bench COMMAND WORDS...` in `size` processes. What they print goes to the file `output`."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    output.write_text("")
    ranks = [start(words, output, rank, size, store.port, sabotage, command) for rank in range(size)]
    for process in ranks:
        process.join(LIMIT_S)
        process.kill()  # nothing for one that has ended
        process.join()
    return Ended([process.exitcode for process in ranks], whole(output.read_text()))


def start(
    words: Sequence[str],
    output: Path,
    rank: int = 0,
    size: int = 1,
    port: int = 0,
    sabotage: Sabotage | None = None,
    command: str = "run",
) -> BaseProcess:
    """One of these processes: it begins without the ten seconds that imports take."""
    arguments = (rank, size, port, [command, *words], output, sabotage)
    process = forkserver().Process(target=_rank, args=arguments, daemon=True)
    process.start()
    return process


def forkserver() -> ForkServerContext:
    """Its processes are forks of one that has imported what runs need."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.parallel.imported"])
    return context


def _rank(rank: int, size: int, port: int, words: list[str], output: Path, sabotage: Sabotage | None) -> None:
    import qerl_studies.figures.run as figures
    from qerl_bench.__main__ import main
    from tests.parallel.threads import one_thread

    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    if size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    one_thread()
    figures.run_figures = lambda path: None  # takes seconds

    def program() -> object:
        if sabotage is not None:
            sabotage(rank)
        sys.argv = ["qerl-bench", *words]
        return main(words)

    finish(program)


def finish(program: Callable[[], object]) -> NoReturn:
    """End this process as `program` does, which prints to its descriptors 1 and 2."""
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
    code: object = 1
    try:
        code = program()
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)
