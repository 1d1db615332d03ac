"""One run on several GPUs: the processes that torchrun starts, called ranks, and what they tell each other.

Every rank makes every step, with the whole base or a part of it (`model/sharding.py`). They share out the sampling, the
grading and the backward passes of a step, and give each other the results, so that each computes the same advantages,
metrics and update. Rank 0 writes the run; the others write to a folder that is deleted. An evaluation of a finished run
is shared in the same way.

A run in one process is a `World` of size 1, whose operations do nothing, without torch.distributed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from qerl_core.checks import ConfigError, TrainingStopped, check_fields, flag, require
from qerl_core.process.inherited import PLACE, is_of_launcher
from qerl_core.process.rendezvous import arrived
from qerl_core.process.termination import Terminated

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Item = TypeVar("Item")
ANSWER_LIMIT_S = 7200.0  # for the slowest rank to arrive where the others wait for it
LET_OTHERS_SPEAK_S = 1.0
STARTED = "TORCHELASTIC_RUN_ID"  # set by torchrun


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """How the ranks of a run share its work."""

    exact: bool
    shard: bool

    def __post_init__(self) -> None:
        check_fields(self, "parallel", exact=flag, shard=flag)


class RankLost(TrainingStopped):
    """Another rank has ended, or does not answer."""

    def __init__(self, waited_s: float) -> None:
        slow = f", or has not answered for {ANSWER_LIMIT_S:g} s" if waited_s > ANSWER_LIMIT_S / 2 else ""
        super().__init__(
            f"another process has ended{slow}; what it printed, or torchrun's report, says why. Repeat the command "
            "with as many processes as there are then: a run continues from its last checkpoint"
        )


class World:
    """The ranks of a run as one of them sees them; this class is a run in one process.

    All ranks call each method at the same place, in the same order.
    """

    rank = 0
    size = 1
    words: Sequence[str] = ()  # for Hydra, which would write into the run's folder

    @property
    def first(self) -> bool:
        """Whether this rank writes the run."""
        return self.rank == 0

    def folder(self, run_dir: Path) -> Path:
        """Where this rank writes what belongs into `run_dir`."""
        return run_dir

    def gather(self, value: T) -> list[T]:
        """The `value` of each rank, by rank."""
        return [value]

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the `tensor` of each rank, bit for bit the same on all; `tensor` may be overwritten."""
        return tensor

    def gather_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The `tensor` of each rank, by rank; all have one shape."""
        return [tensor]

    def take(self, count: int) -> Iterator[int]:
        """Hands out 0 to `count` - 1 on demand, each number to one rank."""
        yield from range(count)

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, where alone it is called. If it raises there, the others raise ConfigError."""
        value = None
        if self.first:
            try:
                value = make()
            except Exception as error:
                self.gather(error if isinstance(error, ConfigError) else ConfigError(str(error)))
                raise
        answer = self.gather(value)[0]
        if isinstance(answer, ConfigError):
            raise answer
        return answer  # type: ignore[return-value]

    @contextmanager
    def together(self, *kinds: type[Exception]) -> Iterator[None]:
        """If any rank raises one of `kinds` in this block, all ranks raise the error of the lowest of them."""
        error = None
        try:
            yield
        except kinds as caught:
            error = caught
        for raised in self.gather(error):
            if raised is not None:
                raise raised

    def split(self, work: Callable[[list[Item]], list[T]], items: list[Item]) -> list[T]:
        """work(items), of which each rank does a slice; `work` gives one result for each item."""
        ends = [len(items) * rank // self.size for rank in range(self.size + 1)]
        results = self.gather(work(items[ends[self.rank] : ends[self.rank + 1]]))
        return [result for of_rank in results for result in of_rank]


ALONE = World()


def largest(world: World, numbers: dict[str, float]) -> dict[str, float]:
    """Of each number the largest of all ranks; a rank may lack some, such as one that sampled nothing."""
    of_ranks = world.gather(numbers)
    names = dict.fromkeys(name for one in of_ranks for name in one)
    return {name: max(one[name] for one in of_ranks if name in one) for name in names}


class Ranks(World):
    """The processes that torchrun has started.

    They talk through gloo, so that a rank waits for the others on the CPU, where it notices at once that one has died.
    NCCL, which would not, adds up gradients only, when all ranks have arrived.
    """

    def __init__(self, scratch: Path) -> None:
        import torch.distributed as distributed

        store, self.rank, self.size = arrived()
        self._wait_s = timedelta(seconds=ANSWER_LIMIT_S)
        distributed.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=self._wait_s)
        self._distributed, self._store, self._scratch = distributed, store, scratch
        self._nccl: Any = None
        self._takes = 0
        self.before_meeting: Callable[[object], None] = lambda value: None  # with a sharded base: `Passes`
        if not self.first:
            self.words = (f"hydra.run.dir='{scratch}'",)

    def folder(self, run_dir: Path) -> Path:
        return run_dir if self.first else self._scratch / "run"

    def gather(self, value: T) -> list[T]:
        self.before_meeting(value)
        values: list[Any] = [None] * self.size
        with self.answer():
            self._distributed.all_gather_object(values, value)
        return values

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        self.before_meeting(None)
        group = self.group_of(tensor.device)
        with self.answer():
            self._distributed.all_reduce(tensor, group=group)
        return tensor

    def largest_of(self, number: int) -> int:
        """The largest `number` of all ranks, asked for on the way to a meeting."""
        import torch

        with self.answer():
            self._distributed.all_reduce(most := torch.tensor(number), op=self._distributed.ReduceOp.MAX)
        return int(most)

    def gather_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.before_meeting(None)
        group, tensors = self.group_of(tensor.device), [tensor.new_empty(tensor.shape) for _ in range(self.size)]
        with self.answer():
            self._distributed.all_gather(tensors, tensor, group=group)
        return tensors

    def take(self, count: int) -> Iterator[int]:
        self._takes += 1
        counter = f"take/{self._takes}"
        while (number := self._next(counter)) < count:
            yield number

    def _next(self, counter: str) -> int:
        with self.answer():
            return self._store.add(counter, 1) - 1

    def group_of(self, device: torch.device) -> Any:
        """None, which is gloo, for tensors of the CPU; NCCL for those of a GPU, after all ranks have arrived."""
        if device.type != "cuda":
            return None
        self.gather(None)
        if self._nccl is None:
            self._nccl = self._distributed.new_group(backend="nccl", timeout=self._wait_s)
        return self._nccl

    @contextmanager
    def answer(self) -> Iterator[None]:
        """Context of a request to other ranks. Raises RankLost if one does not answer."""
        started = time.monotonic()
        try:
            yield
        except (RuntimeError, ConnectionError) as error:
            if type(error).__name__ == "OutOfMemoryError":
                raise
            raise RankLost(time.monotonic() - started) from error

    def claims_error_output(self) -> bool:
        """Whether this rank is the first to end in an error. Ranks other than 0 let it speak first."""
        if not self.first:
            with suppress(Terminated):  # by torchrun, because another rank has ended
                time.sleep(LET_OTHERS_SPEAK_S)
        try:
            return self._store.add("spoken", 1) == 1
        except (RuntimeError, ConnectionError):  # torchrun has ended
            return True

    def leave(self) -> None:
        self._distributed.destroy_process_group()


def is_rank0_output() -> bool:
    """Whether this process says what needs no run: of those that torchrun has started, rank 0 alone."""
    return STARTED not in os.environ or os.environ.get("RANK", "0") == "0"


@contextmanager
def joined_ranks() -> Iterator[World]:
    """The world that this process belongs to. It ends with this block, and so does what torchrun has set for it.

    Only rank 0 prints; of ranks that end in an error, one. Each sees one GPU, that of its place on the machine.
    Raises ConfigError for variables of torchrun that torchrun has not set.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    given = [name for name in PLACE if name in os.environ]
    alone = size == "1" and os.environ.get("RANK", "0") == "0"
    require(
        alone or (STARTED in os.environ and len(given) == len(PLACE)),
        f"{', '.join(f'{name}={os.environ[name]}' for name in given)} is set, and torchrun has not started this "
        f"process. Several GPUs: torchrun --nproc-per-node N -m qerl_bench ...; one process: env -u "
        f"{' -u '.join(given)}",
    )
    if STARTED not in os.environ or size == "1":
        yield ALONE
        return
    show_own_gpu(int(os.environ["LOCAL_RANK"]))
    with tempfile.TemporaryDirectory(prefix="qerl-bench-rank-") as scratch:
        ranks = Ranks(Path(scratch))
        for name in filter(is_of_launcher, [*os.environ]):
            del os.environ[name]  # programs that this one starts are no ranks
        with silence_other_ranks(ranks):
            yield ranks
            ranks.leave()


def refuse_ranks(command: str) -> None:
    """Raise ConfigError, one of them in words, if torchrun has started several processes of `command`."""
    if STARTED in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        with joined_ranks():
            raise ConfigError(f"only run and eval share their work: leave torchrun out, qerl-bench {command} ...")


def show_own_gpu(local_rank: int) -> None:
    """Hide all GPUs but that of this rank from CUDA, for child processes too. Call it before CUDA starts."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    own = [str(local_rank)] if visible is None else visible.split(",")[local_rank : local_rank + 1]
    os.environ["CUDA_VISIBLE_DEVICES"] = "".join(own)


@contextmanager
def silence_other_ranks(ranks: Ranks) -> Iterator[None]:
    """In this block ranks other than 0 print nothing. After an error one rank may print what it was."""
    stdout, stderr = sys.stdout, sys.stderr
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - whoever prints the message comes after this block
    if not ranks.first:
        sys.stdout = sys.stderr = nowhere
    try:
        yield
    except BaseException:
        sys.stdout = sys.stderr = nowhere
        if ranks.claims_error_output():
            sys.stdout, sys.stderr = stdout, stderr
        raise
    sys.stdout, sys.stderr = stdout, stderr
    nowhere.close()
