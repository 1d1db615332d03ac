"""Memory that runs out, of a GPU or of the machine, in words: in which phase, how much there was, and what to set.

Left out: the kernel's out-of-memory killer, which sends SIGKILL, so that no message can be printed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from qerl_core.checks import TrainingStopped

Item = TypeVar("Item")
Result = TypeVar("Result")
NO_MEMORY = "no memory is left"  # in every message here
REMEDIES = {  # of each phase
    "setup": "a quant of fewer bits or a smaller model",
    "rollout": "a smaller engine.max_num_seqs, engine.cache_gib, engine.dequantized_gib, rollout.group_size or "
    "task.max_completion_tokens",
    "train": "a smaller train.micro_batch_tokens, or train.recompute=full",
    "evaluation": "a smaller eval.questions or eval.samples",
}
# PyTorch on a CPU, C++, memory that cannot be mapped, threads of Rust (tokenizers) and Python that get no stack. Then a
# full GPU: no memory for a context, a handle of cuBLAS or a kernel. And Python, which had none left for an exception.
SAID = re.compile(
    r"can't allocate memory|not enough memory|bad_alloc|Cannot allocate memory|ThreadPoolBuildError"
    r"|can't start new thread|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|\[CUDA\]: out of memory"
    r"|error return without exception set"
)

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
UNUSED = re.compile(rf"Tried to allocate {SIZE}\..* {SIZE} is reserved by PyTorch but unallocated")
OTHERS = re.compile(r" Process \d+ has [^.]+\.\d+ \w+ memory in use\.| See documentation for .*")  # of a GPU's message


class Releasable(Protocol):
    """Keeps memory between two uses, and gives it back if something else needs it."""

    @property
    def holds_memory(self) -> bool: ...

    def release(self) -> None: ...


def shortage(error: BaseException | None) -> str | None:
    """What an error says about memory that ran out, shortened; None if it is about something else, or there is none.

    TrainingStopped, which may quote such an error, is to end the run, so nothing is repeated for it.
    """
    if isinstance(error, TrainingStopped):
        return None
    kind = type(error).__name__
    other = isinstance(error, (RuntimeError, OSError, ImportError, SystemError)) or kind == "PanicException"
    if not isinstance(error, MemoryError) and kind != "OutOfMemoryError" and not (other and SAID.search(str(error))):
        return None
    words = OTHERS.sub("", " ".join(str(error).split())) or kind
    return words if len(words) <= 500 else f"{words[:500]}..."


def held_unused(said: str) -> bool:
    """Whether PyTorch held as much as was wanted without using it, by what it `said` (`shortage`).

    It lies in pieces between what is in use, or in pools that recordings keep, and can be given back once the work that
    ran short has ended.
    """
    if (found := UNUSED.search(said)) is None:
        return False
    wanted, unit, held, held_unit = found.groups()
    return float(held) * UNITS[held_unit] >= float(wanted) * UNITS[unit]


def whole_or_halves(work: Callable[[Sequence[Item]], list[Result]], items: Sequence[Item]) -> list[Result]:
    """work(items), a result for each; where memory runs out, the same of one half of them after the other."""
    try:
        return work(items)
    except Exception as error:
        if shortage(error) is None or len(items) < 2:
            raise
    half = len(items) // 2
    return [*whole_or_halves(work, items[:half]), *whole_or_halves(work, items[half:])]


@contextmanager
def memory_for(phase: str) -> Iterator[None]:
    """Say in words that memory ran out in this block, which is the `phase` of a run."""
    try:
        yield
    except TrainingStopped:  # has words, perhaps these
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        said = shortage(error)
        if said is None:
            raise
        remedy = REMEDIES.get(phase, "a smaller model")
        raise TrainingStopped(
            f"{phase}: {NO_MEMORY} ({said}). If another process has used it, the same command continues from the "
            f"last checkpoint. If not, this needs a machine with more memory, or {remedy}"
        ) from error
