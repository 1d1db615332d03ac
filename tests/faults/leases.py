"""Two and three machines on one folder: processes that say which machine they are, with file systems as they occur.

Locks hold on one machine only here, as on Lustre with localflock or NFS with nolock, or are missing; links may be
missing too. One run in the folder at a time, and its numbers, are owed whatever happens to a machine.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tests.faults import sabotage
from tests.faults.attempt import Attempt
from tests.faults.damage import DAMAGES
from tests.faults.run import SURVIVED, Case, Lost, Outcome, checked, drawing_nothing, require_killed

BEAT_S, STALE_S = 0.2, 2.0
YEAR_S = 365.25 * 86400


def leases(operations: Sequence[int], draw: random.Random) -> dict[str, Callable[[Case], Outcome]]:
    def some(count: int) -> list[int]:
        return sorted(draw.sample(operations, min(count, len(operations))))

    damages = [(n, name, harm) for n in some(2) for name, harm in DAMAGES.items() if name != "delete"]
    return {
        **{
            f"{count} machines, {ms} ms apart, {files}": partial(together, count, ms / 1000, files)
            for files in FILE_SYSTEMS
            for count in (2, 3)
            for ms in (0, *draw.sample(range(2000), 5))
        },
        **{f"machine killed at operation {n}": partial(killed, n) for n in some(40)},
        **{
            f"machine killed at operation {n}, its lease {name}": partial(killed, n, harm=harm)
            for n, name, harm in damages
        },
        **{f"machine suspended at operation {n}": partial(suspended, n) for n in some(40)},
        **{
            f"machine {seconds / YEAR_S:+.6g} years ahead, {ms} ms apart": partial(ahead, seconds, ms / 1000)
            for seconds in (-YEAR_S, -3600, 3600, YEAR_S)
            for ms in draw.sample(range(2000), 5)
        },
    }


def locks_of_one_machine() -> None:
    from qerl_core.rundir import locks

    locks.fcntl.flock = lambda file, kind: None  # which another machine does not see


def no_locks() -> None:
    from qerl_core.rundir import locks

    def missing(file: object, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    locks.fcntl.flock = missing


FILE_SYSTEMS = {"locks of one machine": locks_of_one_machine, "no locks": no_locks}


def on_machine(case: Case, name: str, files: str = "locks of one machine", clock_s: float = 0.0) -> None:
    """This process is on the machine `name`, whose clock is `clock_s` ahead."""
    from qerl_core.rundir import lease

    lease.machine = lambda: name
    lease.BEAT_S, lease.STALE_S = BEAT_S, STALE_S
    os.environ["XDG_CACHE_HOME"] = str(case.root / "home")  # whose locks a killed machine holds, too
    FILE_SYSTEMS[files]()
    if clock_s:
        now = time.time
        time.time = lambda: now() + clock_s


def machine(case: Case, name: str, *more: Callable[[], object], files: str = "locks of one machine") -> Attempt:
    def both() -> None:
        on_machine(case, name, files)
        for each in more:
            each()

    return Attempt(case.words(), drawing_nothing(both))


def one_ran(case: Case, attempts: Sequence[Attempt]) -> Outcome:
    ends = [checked(each.wait()) for each in attempts]
    for ended in ends:
        case.in_words(ended, 0, os.EX_TEMPFAIL)
    if all(ended.code for ended in ends):
        raise Lost("no machine ran")
    case.require_numbers()
    return SURVIVED


def together(count: int, seconds: float, files: str, case: Case) -> Outcome:
    attempts = []
    for number in range(count):
        attempts.append(machine(case, f"machine-{number}", files=files))
        time.sleep(seconds)
    return one_ran(case, attempts)


def ahead(clock_s: float, seconds: float, case: Case) -> Outcome:
    first = machine(case, "a")
    time.sleep(seconds)
    return one_ran(case, [first, machine(case, "b", partial(on_machine, case, "b", clock_s=clock_s))])


def killed(number: int, case: Case, harm: Callable[[Path], object] = Path.exists) -> Outcome:
    """Another machine is told to wait while the lease seems alive, and then continues the run; before, `harm` is done
    to the lease that the killed one has left, if it has."""
    require_killed(checked(machine(case, "a", partial(sabotage.killed_at_operation, case.root, number)).wait()))
    if (lease := case.folder / ".lock.lease").exists():
        harm(lease)
    end = time.monotonic() + 20 * STALE_S
    while (ended := checked(machine(case, "b").wait())).code == os.EX_TEMPFAIL and time.monotonic() < end:
        time.sleep(STALE_S / 2)
    case.in_words(ended, 0)
    case.require_numbers()
    return SURVIVED


def suspended(number: int, case: Case) -> Outcome:
    """A machine sleeps for so long that another one takes the run over; it wakes while that one runs."""
    first = machine(
        case,
        "a",
        lambda: sabotage.at_operation(case.root, number, lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    )
    os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    time.sleep(1.5 * STALE_S)
    second = machine(case, "b")
    time.sleep(0.3)
    first.send(signal.SIGCONT)
    return one_ran(case, [first, second])
