"""Several processes of one run, as torchrun starts them, with gloo on the CPU: what happens to one, happens to the run.

With parallel.exact=true the numbers are those of one process, so one process, or any number, may continue.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tests.faults import sabotage
from tests.faults.attempt import Attempt, Ended
from tests.faults.run import SURVIVED, Case, Lost, Outcome, checked, drawing_nothing

EXACT = "parallel.exact=true"
Harm = Callable[[Case], object]


def ranks(operations: Sequence[int], draw: random.Random) -> dict[str, Callable[[Case], Outcome]]:
    def some(count: int) -> list[int]:
        return sorted(draw.sample(operations, min(count, len(operations))))

    late = (0.0, 0.5, 1.0, 2.0)
    return {
        **{
            f"rank 0 killed at operation {n}, continued by {size}": partial(
                harmed, 0, lambda case, n=n: sabotage.killed_at_operation(case.root, n), size
            )
            for n in some(25)
            for size in (1, 2)
        },
        **{
            f"rank {rank} killed in {place}, call {call}, continued by {size}": partial(
                harmed, rank, partial(killed_in, place, call), size
            )
            for rank in (0, 1)
            for place in CALLS
            for call in (1, 2, 4)
            for size in (1, 2)
        },
        **{
            f"rank {rank} raises {type(error).__name__} in {place}": partial(
                harmed, rank, partial(raising_in, place, error), 2
            )
            for rank in (0, 1)
            for place in CALLS
            for error in (OSError(5, "Input/output error"), MemoryError())
        },
        **{
            f"{number.name} to {'all' if rank is None else f'rank {rank}'} after {ms} ms": partial(
                signalled, number, rank, ms / 1000
            )
            for number in (signal.SIGTERM, signal.SIGINT)
            for rank in (0, 1, None)
            for ms in draw.sample(range(200, 3000), 4)
        },
        **{f"rank 1 is {seconds:g} s late": partial(late_rank, seconds) for seconds in late},
    }


CALLS = {  # module and function of the loop, which all ranks call
    "setup": ("qerl_bench.run_setup", "checked_engine"),
    "an evaluation": ("qerl_bench.experiment", "evaluate"),
    "a step": ("qerl_bench.experiment", "train_step"),
    "a backward pass": ("qerl_bench.train.update", "forward_backward"),
}


def at_call(place: str, number: int, do: Callable[[], object]) -> None:
    from tests.faults.kinds import replace_function

    count = [0]

    def wrap(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            count[0] += 1
            if count[0] == number:
                do()
            return function(*arguments, **options)

        return call

    replace_function(*CALLS[place], wrap)


def killed_in(place: str, number: int, case: Case) -> None:
    at_call(place, number, sabotage.killed)


def raising_in(place: str, error: Exception, case: Case) -> None:
    def fail() -> None:
        raise error

    at_call(place, 1, fail)


LOGGED = re.compile(r"\d\d:\d\d:\d\d ")  # the beginning of a line that is no last word
STORES: list[Any] = []  # of this process, for as long as it lasts


def start(case: Case, size: int, victim: int | None = None, harm: Harm | None = None) -> list[Attempt]:
    """The ranks of a run; `harm` is done to the process of rank `victim`."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    STORES.append(store)

    def becoming(rank: int) -> Callable[[], None]:
        def become() -> None:
            os.environ.update(
                {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(store.port),
                    "TORCHELASTIC_RUN_ID": "faults",
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                }
            )
            if harm is not None and rank == victim:
                harm(case)

        return become

    return [Attempt(case.words(EXACT), drawing_nothing(becoming(rank))) for rank in range(size)]


def run(case: Case, size: int, victim: int | None = None, harm: Harm | None = None) -> list[Ended]:
    return [checked(each.wait()) for each in start(case, size, victim, harm)]


def continued(case: Case, size: int) -> Outcome:
    if size == 1:
        return case.ends(EXACT)
    return whole(case, run(case, size))


def whole(case: Case, ends: list[Ended]) -> Outcome:
    if any(ended.code for ended in ends):
        raise Lost(f"exit codes {[ended.code for ended in ends]}: {' '.join(ended.words for ended in ends)}")
    case.require_numbers()
    return SURVIVED


def harmed(victim: int, harm: Harm, size: int, case: Case) -> Outcome:
    """What ends one of two processes ends both, one of them in words, and `size` processes continue."""
    ends = run(case, 2, victim, harm)
    if all(ended.code == 0 for ended in ends):
        case.require_numbers()
        return SURVIVED
    if (case.folder / "done.json").exists():  # killed behind the last step
        return continued(case, size)
    if ends[0].code == 0:
        raise Lost(f"rank 0 ended whole, and the run did not: {[ended.code for ended in ends]}")
    others = [ended for ended in ends if ended.code != -signal.SIGKILL]
    if not any(ended.code and ended.words and not LOGGED.match(ended.words) for ended in others):
        raise Lost(f"not in words: {[ended.code for ended in ends]}")
    return continued(case, size)


def signalled(number: signal.Signals, rank: int | None, seconds: float, case: Case) -> Outcome:
    attempts = start(case, 2)
    time.sleep(seconds)
    for place, each in enumerate(attempts):
        if rank in (None, place):
            each.send(number)
    ends = [checked(each.wait()) for each in attempts]
    if all(ended.code == 0 for ended in ends):
        case.require_numbers()
        return SURVIVED
    if not any(ended.words for ended in ends):
        raise Lost(f"no process says why: {[ended.code for ended in ends]}")
    return continued(case, 2)


def late_rank(seconds: float, case: Case) -> Outcome:
    return whole(case, run(case, 2, 1, lambda case: time.sleep(seconds)))
