"""Every kind of fault, and what a run owes after each. `all_faults` lists them with their places.

A killed run must continue by itself; one that met a failing disk, too little memory or a damaged file must say so in
words, and continue when that is solved as the words say. Either way it must end with the numbers of an undisturbed run.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.faults import beside, sabotage
from tests.faults.alive import (
    STOPS,
    between_attempts,
    changed,
    damaged_evaluation,
    evaluation_inputs,
    evaluations,
    harmed_alive,
    while_alive,
)
from tests.faults.attempt import Attempt, Ended, Sabotage
from tests.faults.damage import DAMAGES, HARMS, nothing
from tests.faults.foreign import folder, folders, gguf, gguf_files, preflights
from tests.faults.leases import killed, leases
from tests.faults.mirrors import continued, mirrors
from tests.faults.ranks import continued as continued_by_ranks
from tests.faults.ranks import ranks
from tests.faults.run import (
    SURVIVED,
    Case,
    Lost,
    Outcome,
    Stock,
    checked,
    drawing_nothing,
    numbers,
    remedy,
    require_killed,
    require_whole,
)

ROOT = Path(__file__).parents[2]
PACKAGES = (str(ROOT / "src"), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")]))
SIGNALS = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGINT: 130}
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.ESTALE)
NO_MOUNT = "no small file system can be mounted here: only root may"
YEAR_S = 365.25 * 86400
BASE_FILES = ("model/config.json", "model/model.safetensors", "manifest.json", "trainer.pt", "../../done.json")


@dataclass(frozen=True)
class Fault:
    kind: str
    place: str
    happen: Callable[[Case], Outcome]


def all_faults(stock: Stock, draw: random.Random) -> dict[str, list[Fault]]:
    """All faults by kind. `draw` chooses the places where there are too many to list."""
    size = max(file.stat().st_size for file in (stock.path / "finished").rglob("*") if file.is_file())
    operations = range(1, stock.operations + 1)

    def operation() -> int:
        return draw.choice(operations)

    files = sorted(str(f.relative_to(stock.path / "finished")) for f in (stock.path / "finished").rglob("*"))
    places: dict[str, dict[str, Callable[[Case], Outcome]]] = {
        "kill before a file operation": {f"operation {n}": partial(kill, [n]) for n in operations},
        "kill twice": {f"operations {a}, {b}": partial(kill, [a, b]) for a, b in pairs(operation, operation, 200)},
        "kill in a write": {f"byte {n} of a file": partial(kill_in_write, n) for n in up_to(size, draw, 200)},
        "kill at a random time": {f"{ms} ms": partial(kill_later, ms / 1000) for ms in draw.sample(range(3000), 200)},
        "power loss": {
            f"operation {a}, draw {b}": partial(power_loss, a, b)
            for a, b in pairs(operation, lambda: draw.randrange(10**6), 300)
        },
        "signal": {
            f"{number.name} at operation {n}": partial(signalled, number, n) for number in SIGNALS for n in operations
        },
        "two processes": {f"{ms} ms apart": partial(two, ms / 1000) for ms in draw.sample(range(2000), 60)},
        "full disk": full_disks(draw),
        "file size limit": {f"{n} bytes": partial(too_large, n) for n in up_to(size, draw, 60)},
        "failing disk": {
            f"{errno.errorcode[code]} at operation {n}, {'once' if times == 1 else 'from there on'}": partial(
                failing_disk, n, code, times
            )
            for code in DISK
            for n in operations
            for times in (1, 10**9)
        },
        "failing sync": {f"sync {n}": partial(failing_sync, n) for n in range(1, 60)},
        "damaged file": {
            f"{state}: {file}: {damage}": partial(damaged, state, file, damage)
            for state in ("unfinished", "finished")
            for file in files
            if (stock.path / state / file).is_file() and (stock.path / state / file).stat().st_size
            for damage in DAMAGES
        },
        "file of a live run": while_alive(),
        "changed since a kill": between_attempts(),
        "evaluation inputs": evaluation_inputs(),
        "damaged evaluation": evaluations(),
        "damaged warm start": {
            f"{file}: {damage}": partial(damaged_base, file, damage) for file in BASE_FILES for damage in DAMAGES
        },
        "clock jump": {
            f"{seconds / YEAR_S:+.6g} years at operation {n}": partial(clock, n, seconds)
            for seconds in (-60 * YEAR_S, -YEAR_S, -3600, 3600, YEAR_S, 300 * YEAR_S)
            for n in (1, *draw.sample(operations, 10))
        },
        "surroundings": SURROUNDINGS,
        "little memory": {
            f"{mib} MiB more": partial(little_memory, mib) for mib in (*range(0, 40, 2), *range(40, 200, 10))
        },
        "out of memory, simulated": {
            f"{named} in {place}": partial(out_of_memory, place, error)
            for place in PHASES
            for named, error in OUT_OF_MEMORY.items()
        },
        "not finite": {
            f"{value} in {place}, {'on_nonfinite=' + on if on else 'step 2'}": partial(not_finite, place, value, on)
            for place, choices in NOT_FINITE.items()
            for value in ("nan", "inf", "-inf")
            for on in choices
        },
        "data": {
            f"{text[:10]!r} as {column}": partial(data, column, text)
            for column in ("question", "answer")
            for text in DATA
        },
        "logger": {
            f"W&B {place}: {type(error).__name__}": partial(logger, place, error)
            for place in ("init", "log", "finish")
            for error in (ConnectionError("the server is gone"), OSError(errno.ENOSPC, "full"), RuntimeError("broken"))
        },
        "process of its own": OWN_PROCESS,
        "sweep killed": {
            f"{name} in run {1 + n % 2}": partial(sweep, name, n % 2) for n, name in enumerate(LAUNCHER_SIGNALS)
        },
        "lease": leases(operations, draw),
        "rank": ranks(operations, draw),
        "GGUF file": gguf_files(stock, draw),
        "folder of others": folders(stock),
        "preflight": preflights(),
        "folder beside runs": beside.places(stock),
        "record at W&B": mirrors(operations, draw),
        "GPU out of memory": {"each phase": partial(skipped, "a GPU out of memory: simulated only")},
        "vLLM's process": {"killed, hung": partial(skipped, "vLLM's process killed or hung: not tried here")},
    }
    return {kind: [Fault(kind, place, happen) for place, happen in of_kind.items()] for kind, of_kind in places.items()}


IN_WORDS = {  # kinds that owe words even where the run goes on, and those that are tried elsewhere
    *("signal", "full disk", "out of memory, simulated", "not finite", "logger", "sweep killed", "preflight"),
    *("GPU out of memory", "vLLM's process"),
}


def harmless() -> dict[str, list[Fault]]:
    """One fault of each kind but IN_WORDS that does no harm, which a run must survive: a kind in which it does not
    tests nothing."""
    never, huge = 10**9, 2**40
    places: dict[str, Callable[[Case], Outcome]] = {
        "kill before a file operation": partial(kill, [never]),
        "kill twice": partial(kill, [never, never]),
        "kill in a write": partial(kill_in_write, huge),
        "kill at a random time": partial(kill_later, 0.0),
        "power loss": partial(power_loss, never, 0),
        "two processes": partial(two, 0.0),
        "file size limit": partial(too_large, huge),
        "failing disk": partial(failing_disk, never, errno.EIO, 1),
        "failing sync": partial(failing_sync, never),
        "damaged file": partial(damaged, "unfinished", "metrics.jsonl", nothing.__name__),
        "file of a live run": partial(harmed_alive, "metrics.jsonl", 3, nothing),
        "changed since a kill": partial(changed, None, nothing),
        "evaluation inputs": partial(changed, None, nothing, stop=STOPS["in the last evaluation"]),
        "damaged evaluation": partial(damaged_evaluation, nothing),
        "damaged warm start": partial(damaged_base, "model/config.json", nothing.__name__),
        "clock jump": partial(clock, 1, 0.0),
        "surroundings": partial(unharmed, lambda: None),
        "little memory": partial(little_memory, 2**30),
        "data": partial(data, "question", "What is 4 + 1?"),
        "process of its own": OWN_PROCESS["as users start it"],
        "lease": partial(killed, never),
        "rank": partial(continued_by_ranks, size=2),
        "GGUF file": partial(gguf, nothing),
        "folder of others": partial(folder, nothing, "config.json"),
        "folder beside runs": partial(beside.left_beside, nothing),
        "record at W&B": partial(continued, lambda: None),
    }
    return {kind: [Fault(kind, "no harm", happen)] for kind, happen in places.items()}


def pairs(first: Callable[[], int], second: Callable[[], int], count: int) -> list[tuple[int, int]]:
    return list(dict.fromkeys((first(), second()) for _ in range(count)))


def up_to(size: int, draw: random.Random, count: int) -> list[int]:
    """Sizes below `size`, as many small as large ones."""
    return sorted({int(size ** draw.uniform(0, 1)) for _ in range(count)})


def skipped(reason: str, case: Case) -> Outcome:
    return Outcome("skipped", reason)


# Kills. A killed run says nothing, and the same command continues it.


def kill(operations: list[int], case: Case) -> Outcome:
    for number in operations:
        require_killed(case.attempt(partial(sabotage.killed_at_operation, case.root, number)))
    return case.ends()


def kill_in_write(size: int, case: Case) -> Outcome:
    require_killed(case.attempt(partial(sabotage.killed_at_size, size)), signal.SIGXFSZ)
    return case.ends()


def kill_later(seconds: float, case: Case) -> Outcome:
    started = Attempt(case.words(), drawing_nothing(None))
    time.sleep(seconds)
    started.send(signal.SIGKILL)
    require_killed(checked(started.wait()))
    return case.ends()


def power_loss(number: int, seed: int, case: Case) -> Outcome:
    require_killed(case.attempt(partial(sabotage.power_lost_at_operation, case.root, number, seed)))
    return case.ends()


def signalled(signum: signal.Signals, number: int, case: Case) -> Outcome:
    ended = case.attempt(lambda: sabotage.at_operation(case.root, number, lambda: os.kill(os.getpid(), signum)))
    if "stopped" not in case.in_words(ended, SIGNALS[signum]):
        raise Lost(f"does not say that it stopped: {ended.words}")
    return case.ends()


def two(seconds: float, case: Case) -> Outcome:
    first = Attempt(case.words(), drawing_nothing(None))
    time.sleep(seconds)
    second = Attempt(case.words(), drawing_nothing(None))
    ends = [checked(each.wait()) for each in (first, second)]
    for ended in ends:
        case.in_words(ended, 0, os.EX_TEMPFAIL)
    if all(ended.code for ended in ends):
        raise Lost("neither of two processes ran")
    case.require_numbers()
    return SURVIVED


# Disks. The program names the place, and the same command continues when there is room.


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "faults", folder], check=True, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@cache
def may_mount() -> bool:
    """Whether this process is root, and of a machine that lets it mount."""
    with TemporaryDirectory(prefix="faults-mount-") as folder:
        try:
            with mounted(Path(folder), "size=8k"):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


def full_disks(draw: random.Random) -> dict[str, Callable[[Case], Outcome]]:
    if not may_mount():
        return {"small file systems": partial(skipped, NO_MOUNT)}
    sizes = {f"{pages * 4} KiB": f"size={pages * 4}k" for pages in draw.sample(range(1, 60), 40)}
    inodes = {f"{count} inodes": f"size=8m,nr_inodes={count}" for count in draw.sample(range(2, 50), 30)}
    return {place: partial(full_disk, options) for place, options in (sizes | inodes).items()}


def full_disk(options: str, case: Case) -> Outcome:
    with mounted(case.root, options):
        ended = case.attempt()
        said = "" if ended.code == 0 else case.in_words(ended, 1, 2)
        subprocess.run(["mount", "-o", "remount,size=8m,nr_inodes=1000", case.root], check=True)
        return case.ends(said=said)


def told_of_disk(case: Case, harm: Sabotage) -> Outcome:
    """The attempt ends with a message, or the run does not need what failed; then the same command ends it."""
    ended = case.attempt(harm)
    said = "" if ended.code == 0 else case.in_words(ended, 1, 2)
    return case.ends(said=said)


def too_large(size: int, case: Case) -> Outcome:
    return told_of_disk(case, partial(sabotage.files_of_at_most, size))


def failing_disk(number: int, code: int, times: int, case: Case) -> Outcome:
    return told_of_disk(case, partial(sabotage.failing_from_operation, case.root, number, code, times))


def failing_sync(number: int, case: Case) -> Outcome:
    return told_of_disk(case, partial(sabotage.failing_sync, number))


# Damaged files. They are refused by name, and what the message says to do helps; or they are made again.


def damaged(state: str, file: str, damage: str, case: Case) -> Outcome:
    folder = case.copy(state)
    HARMS[damage](folder / file)
    ended = case.attempt()
    if ended.code == 0:
        case.require_numbers()
        require_whole(case.folder)
        if "step_000002" in file and state == "unfinished" and "step_000002" not in ended.said:
            raise Lost("no warning of a damaged checkpoint")
        return SURVIVED
    said = case.in_words(ended, 2)
    if Path(file).name not in said and "manifest.json" not in said and Path(file).parts[0] not in said:
        raise Lost(f"does not name the file: {said}")
    for _ in range(4):  # one remedy may lead to the next: a checkpoint to delete, then the one before it
        remedy(case, said, file)
        ended = case.attempt()
        if ended.code == 0:
            break
        said = case.in_words(ended, 2)
    return case.ends(said=said)


def damaged_base(file: str, damage: str, case: Case) -> Outcome:
    """A warm start that is damaged in the cache is made again, in a fork in the place of its process."""
    warm = ("model.warm_start_steps=1", "lora.rank=2")  # not the numbers of the other runs
    ended = case.attempt(forking_children, *warm)
    if ended.code != 0:
        raise Lost(f"the warm start ended with {ended.code}: {ended.words}")
    expected = numbers(case.folder)
    shutil.rmtree(case.folder)
    (checkpoint,) = case.root.glob("cache/runs/*/checkpoints/step_*")
    HARMS[damage](checkpoint / file)
    ended = case.attempt(forking_children, *warm)
    if ended.code != 0:
        said = case.in_words(ended, 1, 2)
        shutil.rmtree(case.root / "cache")
        again = Case(case.root, expected, case.stock)
        ended = again.attempt(forking_children, *warm)
        if ended.code != 0:
            raise Lost(f"not made again: {ended.words}")
        again.require_numbers()
        return Outcome("refused", said)
    Case(case.root, expected, case.stock).require_numbers()
    return SURVIVED


def forking_children() -> None:
    """Have the process of a warm start forked, as attempts are."""
    from hydra.core.global_hydra import GlobalHydra

    from qerl_bench import model_setup

    class Child:
        def __init__(self, words: list[str]) -> None:
            self.attempt = Attempt(words[words.index("run") :], GlobalHydra.instance().clear)
            self.pid = self.attempt.pid

        def poll(self) -> int | None:
            status = self.attempt.poll()
            return None if status is None else os.waitstatus_to_exitcode(status)

        def send_signal(self, signum: int) -> None:
            self.attempt.send(signum)

    model_setup.base_checkpoint.__defaults__ = (Child,)  # which every importer of the function calls it with
    model_setup.run_command = lambda: ["run"]


# Clock, surroundings, memory.


def clock(number: int, seconds: float, case: Case) -> Outcome:
    ended = case.attempt(partial(sabotage.clock_jumping, case.root, number, seconds))
    if ended.code != 0:
        raise Lost(f"exit code {ended.code}: {ended.words}")
    case.require_numbers()
    return SURVIVED


def unharmed(harm: Sabotage, case: Case) -> Outcome:
    ended = case.attempt(harm)
    if ended.code != 0:
        raise Lost(f"exit code {ended.code}: {ended.words}")
    case.require_numbers()
    return SURVIVED


def refused_or_unharmed(harm: Sabotage, case: Case) -> Outcome:
    ended = case.attempt(harm)
    return case.ends(said="" if ended.code == 0 else case.in_words(ended, 1, 2))


def without(*names: str) -> None:
    for name in names:
        os.environ.pop(name, None)


def closing(*descriptors: int) -> None:
    """Close streams, as the shell does with >&- before a program starts."""
    for descriptor in descriptors:
        os.close(descriptor)
        setattr(sys, ("stdin", "stdout", "stderr")[descriptor], None)


def to_full_device(*descriptors: int) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(full, descriptor)


def to_closed_pipe(*descriptors: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for descriptor in descriptors:
        os.dup2(writer, descriptor)


def in_deleted_folder() -> None:
    folder = Path("/tmp") / f"faults-gone-{os.getpid()}"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()


def read_only_root(case: Case) -> Outcome:
    if not may_mount():
        return Outcome("skipped", NO_MOUNT)
    with mounted(case.root, "size=8m"):
        subprocess.run(["mount", "-o", "remount,ro", case.root], check=True)
        said = case.in_words(case.attempt(), 2)
        subprocess.run(["mount", "-o", "remount,rw", case.root], check=True)
        return case.ends(said=said)


def in_folder(parts: tuple[str, ...], case: Case) -> Outcome:
    """Below a folder with this path the run ends with the same numbers, or says that the path is too long."""
    inside = Case(case.root.joinpath(*parts), case.expected, case.stock)
    ended = inside.attempt()
    if ended.code == 0:
        inside.require_numbers()
        return SURVIVED
    return case.ends(said=inside.in_words(ended, 1, 2))


def named(name: str, case: Case) -> Outcome:
    ended = case.attempt(None, f"name='{name}'")
    if ended.code == 0:
        case.require_numbers(case.root / "runs" / name)
        return SURVIVED
    return case.ends(said=case.in_words(ended, 2))


SURROUNDINGS: dict[str, Callable[[Case], Outcome]] = {
    "no HOME": partial(unharmed, partial(without, "HOME")),
    "no TMPDIR": partial(unharmed, partial(without, "TMPDIR")),
    "TMPDIR does not exist": partial(unharmed, partial(os.environ.__setitem__, "TMPDIR", "/does/not/exist")),
    "HOME does not exist": partial(unharmed, partial(os.environ.__setitem__, "HOME", "/does/not/exist")),
    "no PATH, no LANG": partial(unharmed, partial(without, "PATH", "LANG", "LC_ALL")),
    "stdin closed": partial(unharmed, partial(closing, 0)),
    "stdout closed": partial(unharmed, partial(closing, 1)),
    "stderr closed": partial(unharmed, partial(closing, 2)),
    "stdin, stdout, stderr closed": partial(unharmed, partial(closing, 0, 1, 2)),
    "stdout full": partial(unharmed, partial(to_full_device, 1)),
    "stdout and stderr full": partial(unharmed, partial(to_full_device, 1, 2)),
    "reader of stdout gone": partial(unharmed, partial(to_closed_pipe, 1)),
    "reader of stdout and stderr gone": partial(unharmed, partial(to_closed_pipe, 1, 2)),
    "working folder deleted": partial(refused_or_unharmed, in_deleted_folder),
    "30 open files": partial(refused_or_unharmed, partial(resource.setrlimit, resource.RLIMIT_NOFILE, (30, 30))),
    "15 open files": partial(refused_or_unharmed, partial(resource.setrlimit, resource.RLIMIT_NOFILE, (15, 15))),
    "8 open files": partial(refused_or_unharmed, partial(resource.setrlimit, resource.RLIMIT_NOFILE, (8, 8))),
    "read-only root": read_only_root,
    "path of 1,000 characters": partial(in_folder, ("x" * 100,) * 10),
    "path of 3,900 characters": partial(in_folder, ("x" * 200,) * 19),
    "path of 5,000 characters": partial(in_folder, ("x" * 200,) * 25),
    "folder of 255 characters": partial(in_folder, ("x" * 255,)),
    "folder of 256 characters": partial(in_folder, ("x" * 256,)),
    "unicode folder": partial(in_folder, ("läufe 日本語 🦆",)),
    "folder with signs": partial(in_folder, ("a=b, {c} $d [e]",)),
    "unicode name": partial(named, "läufe 日本語"),
    "name of 255 characters": partial(named, "n" * 255),
    "name of 200 characters": partial(named, "n" * 200),
}


def little_memory(mib: int, case: Case) -> Outcome:
    ended = case.attempt(partial(sabotage.memory_of_at_most, mib * 2**20))
    linker = ended.code == 127 and "cannot allocate memory for thread-local data" in ended.said  # that of the C library
    if linker or ended.code in (-signal.SIGABRT, -signal.SIGSEGV):  # or a library in Rust or C++: a kill
        return case.ends()
    return case.ends(said="" if ended.code == 0 else case.in_words(ended, 1, 2))


PHASES = {  # place: module, function, and the call of it that fails
    "setup": ("qerl_bench.model_setup", "load_packed", 1),
    "the first evaluation": ("qerl_bench.engine.hf", "HFEngine._sample", 1),
    "sampling": ("qerl_bench.engine.hf", "HFEngine._sample", 4),
    "the backward pass": ("qerl_bench.train.update", "forward_backward", 3),
    "a checkpoint": ("qerl_bench.train.trainer_state", "save_checkpoint", 2),
}
GOES_ON = ("the first evaluation", "sampling", "the backward pass")  # in smaller pieces


def cuda_error() -> Exception:
    import torch

    return torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB is "
        "free. Process 1 has 79.00 GiB memory in use."
    )


OUT_OF_MEMORY: dict[str, Callable[[], Exception]] = {
    "torch.OutOfMemoryError": cuda_error,
    "MemoryError": MemoryError,
    "DefaultCPUAllocator": lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
}


def replace_function(module: str, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    owner: Any = import_module(module)
    *path, name = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, name, wrap(getattr(owner, name)))


def failing_call(module: str, name: str, number: int, error: Callable[[], Exception]) -> None:
    """The `number`-th call of a function raises an error."""
    count = [0]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            count[0] += 1
            if count[0] == number:
                raise error()
            return function(*arguments, **options)

        return call

    replace_function(module, name, wrap)


def out_of_memory(place: str, error: Callable[[], Exception], case: Case) -> Outcome:
    module, name, number = PHASES[place]
    ended = case.attempt(partial(failing_call, module, name, number, error))
    if place in GOES_ON:
        if ended.code != 0 or "no memory is left" not in ended.said:
            raise Lost(f"does not go on: exit code {ended.code}: {ended.words}")
        return case.ends(rounded=True)
    said = case.in_words(ended, 1)
    if not re.search(r"no memory is left .*a smaller ", said):
        raise Lost(f"does not say what to set: {said}")
    return case.ends(said=said)


# Numbers that are not finite. The run stops and says where the first one is, or skips the update.

NOT_FINITE = {
    "a weight of the embedding": ("stop",),
    "a scale of a norm": ("stop",),
    "the adapter": ("stop",),
    "a gradient": ("stop", "skip"),
    "an advantage": ("stop", "skip"),
}


def plant(place: str, value: float) -> None:
    """Put `value` into one number of the policy, before step 2, or of that step."""
    import torch

    import qerl_bench.experiment as loop
    from qerl_bench.run_setup import Setup

    step, batch_of = loop.train_step, loop.rollout_batch

    def train_step(setup: Setup, *others: Any) -> Any:
        if others[-1] != 2:
            return step(setup, *others)
        policy = setup.policy
        words = {
            "a weight of the embedding": "embed_tokens",
            "a scale of a norm": "input_layernorm",
            "the adapter": "lora_A",
        }
        if place in words:
            parameter = next(p for name, p in policy.model.named_parameters() if words[place] in name)
            with torch.no_grad():
                parameter.view(-1)[-1] = value
        if place == "a gradient":
            policy.trainable[0].register_hook(lambda gradient: gradient + value)
        if place == "an advantage":
            loop.rollout_batch = lambda *arguments: planted(batch_of(*arguments))
        result = step(setup, *others)
        policy.trainable[0]._backward_hooks = None
        loop.rollout_batch = batch_of
        return result

    def planted(batch: Any) -> Any:
        batch.advantages[0] = value
        return batch

    loop.train_step = train_step


def not_finite(place: str, value: str, on: str, case: Case) -> Outcome:
    ended = case.attempt(partial(plant, place, float(value)), f"train.on_nonfinite={on}")
    if on == "stop":
        said = case.in_words(ended, 1)
        if "not finite" not in said:
            raise Lost(f"does not say what is wrong: {said}")
        return case.ends(said=said)
    if ended.code != 0:
        raise Lost(f"exit code {ended.code}: {ended.words}")
    lines = [json.loads(line) for line in (case.folder / "metrics.jsonl").read_text().splitlines()]
    if [line["updates_skipped"] for line in lines if line["kind"] == "train"] != [0, 1, 0, 0]:
        raise Lost("not one update was skipped")
    return SURVIVED


DATA = ("NaN", "Infinity", "1e999", "", "\x00", "\\ud800", "9" * 5000, "#### ####")


def data(column: str, text: str, case: Case) -> Outcome:
    """A data set with one such question or answer is refused with the line, or used."""
    lines = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(40)]
    for name, first in (("train", 0), ("eval", 20)):
        part = [dict(line) for line in lines[first : first + 20]]
        if name == "train":
            part[3][column] = text if column == "question" else f"#### {text}"
        written = "\n".join(json.dumps(line).replace("\\\\ud800", "\\ud800") for line in part)
        (case.root / f"{name}.jsonl").write_text(written + "\n")
    files = [f"task.{name}_file='{case.root}/{name}.jsonl'" for name in ("train", "eval")]
    small = ["task=gsm8k", "task.max_completion_tokens=6", *files]
    ended = case.attempt(None, *small)
    if ended.code == 0:
        return SURVIVED
    said = case.in_words(ended, 2)
    if "train.jsonl" not in said and "task." not in said:
        raise Lost(f"names neither file nor option: {said}")
    return Outcome("refused", said)


# Loggers. A mirror that fails is a warning; the run goes on.


def logger(place: str, error: Exception, case: Case) -> Outcome:
    def broken_wandb() -> None:
        from types import SimpleNamespace

        def step(name: str) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if name == place:
                    raise error
                return running if name == "init" else None

            return call

        class UsageError(Exception):
            pass

        running = SimpleNamespace(starting_step=0, summary={}, log=step("log"), finish=step("finish"))
        errors = SimpleNamespace(AuthenticationError=UsageError, UsageError=UsageError)
        package = SimpleNamespace(init=step("init"), errors=errors, Settings=dict, __spec__=None)
        sys.modules |= {"wandb": package, "wandb.errors": errors}  # type: ignore[dict-item]
        import qerl_bench.logger.wandb as module

        module.require_package = lambda *arguments: None

    ended = case.attempt(broken_wandb, "logger=wandb", "logger.mode=offline")
    if ended.code != 0:
        raise Lost(f"exit code {ended.code}: {ended.words}")
    if "logger=wandb" not in ended.said:
        raise Lost("no warning")
    case.require_numbers()
    return SURVIVED


# Processes of their own, started as users start them.


def started(case: Case, *words: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    inherited = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(PACKAGES)}
    command = [sys.executable, "-m", "qerl_bench", *case.words(*words)]
    environment = inherited if environment is None else {**environment, "PYTHONPATH": inherited["PYTHONPATH"]}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finished(process: subprocess.Popen[str]) -> Ended:
    said = process.communicate(timeout=600)[0]
    return checked(Ended(process.returncode, said))


def own_process(environment: dict[str, str] | None, case: Case) -> Outcome:
    ended = finished(started(case, environment=environment))
    if ended.code != 0:
        raise Lost(f"exit code {ended.code}: {ended.words}")
    case.require_numbers()
    return SURVIVED


OWN_PROCESS: dict[str, Callable[[Case], Outcome]] = {
    "as users start it": partial(own_process, None),
    "an empty environment": partial(own_process, {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}),
}
LAUNCHER_SIGNALS = {"KILL": -9, "TERM": 143, "HUP": 129, "INT": 130}


def sweep(name: str, runs: int, case: Case) -> Outcome:
    """The launcher of a sweep of two is killed when `runs` of them have ended: no run outlives it, and the same
    command finishes the sweep."""
    words = ("-m", "lora.rank=4,2", "name=run${lora.rank}", "hydra.launcher.slots=1")
    process = started(case, *words)
    folders = [case.root / "runs" / f"run{rank}" for rank in (4, 2)]
    wait_until(lambda: (folders[runs] / "metrics.jsonl").exists() or process.poll() is not None)
    process.send_signal(getattr(signal, f"SIG{name}"))
    ended = finished(process)
    if ended.code != LAUNCHER_SIGNALS[name]:
        raise Lost(f"exit code {ended.code}: {ended.words}")
    ended = finished(started(case, *words))  # at once: locks of runs that outlive the launcher would show
    if ended.code != 0:
        raise Lost(f"exit code {ended.code}: {ended.words}")
    case.require_numbers(folders[0])
    return SURVIVED


def wait_until(happened: Callable[[], object]) -> None:
    end = time.monotonic() + 300
    while not happened():
        if time.monotonic() > end:
            raise Lost("hung: a sweep did not begin")
        time.sleep(0.05)
