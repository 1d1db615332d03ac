"""Starts vLLM in a child process or in this one, and stops it so that no process and no file is left."""

# vLLM is installed in an environment without a type checker.
# pyright: reportMissingImports=false
from __future__ import annotations

import fcntl
import gc
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qerl_core.checks import TrainingStopped, require

if TYPE_CHECKING:
    from vllm import LLM

log = logging.getLogger(__name__)
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "qerl-bench-vllm-"
SHUTDOWN_TIMEOUT_S = 30.0
LOOK_EVERY_S = 1.0  # whether vLLM's processes still run while it is waited for
ANSWER_LIMIT_S = 3600.0  # for vLLM to start, to take weights, or to sample one rollout
NORMS = "qerl_bench_norms"  # key of vLLM's additional_config


def start(folder: Path, isolation: str, norms: list[str], **options: Any) -> LLM:
    """A vLLM engine for the checkpoint in `folder`, with vLLM's own `options`. Keeps this process's random state.

    The scales of `norms`, named as in the checkpoint, can be written.
    """
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(isolation == "child")),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked child cannot use CUDA
        "QERL_BENCH_RUN_PID": str(os.getpid()),
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    require(
        isolation == "child" or not model_parallel_is_initialized(),
        "this process already runs a vLLM, and it can run only one: close it first, or use engine.isolation=child",
    )
    with torch.random.fork_rng(), answer("start"), interrupts_kept_from_children():  # vLLM seeds this process
        return LLM(
            model=str(folder),
            skip_tokenizer_init=True,  # its own tokenizer might tokenize differently
            generation_config="vllm",  # no sampling defaults from the checkpoint
            logprobs_mode="processed_logprobs",  # temperature included
            worker_cls="qerl_bench.engine.vllm.worker.Worker",
            # part of the cache key: graphs compiled for other norms do not fit
            additional_config={"qerl_bench_norm_dtype": "float32", NORMS: norms},
            enable_prefix_caching=True,
            gpu_memory_utilization=0.01,  # ignored, since kv_cache_memory_bytes is given
            **options,
        )


@contextmanager
def interrupts_kept_from_children() -> Iterator[None]:
    """Processes that start in this block never get SIGINT, whatever handler they set; this one hears it as before.

    A terminal sends Ctrl-C to all processes in its foreground, and vLLM's would end before the run has ended its step.
    A process inherits the signal mask of the thread that starts it, so another thread has to take SIGINT meanwhile.
    Python's resource tracker lifts the block where it starts, so it has to run before.
    """
    resource_tracker.ensure_running()
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()


@contextmanager
def answer(
    to: str, pids: Sequence[int] = (), limit_s: float = ANSWER_LIMIT_S, look_every_s: float = LOOK_EVERY_S
) -> Iterator[None]:
    """Context in which vLLM, with the processes `pids`, has to answer the request `to`.

    vLLM itself waits for ever for a process that hangs, or was killed. Raises TrainingStopped after `limit_s`, or
    if a process has ended. For the main thread, which gets signals.
    """
    end = time.monotonic() + limit_s

    def look(signum: int, frame: object) -> None:
        ended = [pid for pid in pids if not is_running(pid)]
        if ended:
            raise TrainingStopped(
                f"vLLM's process {ended[0]} has died (request: {to}); what it printed above may say why, such as too "
                "little memory (engine.kv_cache_gib). The same command continues from the last checkpoint"
            )
        if time.monotonic() > end:
            raise TrainingStopped(
                f"vLLM has not answered for {limit_s:g} s (request: {to}), so its process is taken to hang. The "
                "same command continues from the last checkpoint"
            )

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, look_every_s, look_every_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def stop(llm: LLM, isolation: str, pids: list[int]) -> None:
    """Shut the engine down and wait until its processes `pids` have ended; those that do not end are killed."""
    llm.llm_engine.engine_core.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
    if isolation == "same":
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    gc.collect()
    running = wait_for(pids)
    for pid in running:
        log.warning("process %d of vLLM did not end in time and is killed", pid)
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGKILL)
    assert not wait_for(running), f"processes {running} of vLLM cannot be killed"


def wait_for(pids: list[int]) -> list[int]:
    """The processes of `pids` that still run after SHUTDOWN_TIMEOUT_S."""
    end = time.monotonic() + SHUTDOWN_TIMEOUT_S
    while (running := [pid for pid in pids if is_running(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    return running


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def exchange_folder(needed: int, memory: Path = SHARED_MEMORY) -> Iterator[Path]:
    """A temporary folder for adapters and norm scales, in shared `memory` if `needed` bytes fit there.

    The folder is locked while in use, and a later run removes folders without a lock. Process ids would not do, because
    containers may share the memory.
    """
    parent = memory
    if not os.access(parent, os.W_OK) or shutil.disk_usage(parent).free < needed:
        parent = Path(tempfile.gettempdir())
        log.info("%s has no room for %.1f MiB, so adapters are passed through %s", memory, needed / 2**20, parent)
    for old in parent.glob(f"{PREFIX}*"):
        remove_abandoned(old)
    new = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))  # hidden from other runs until it is locked
    lock = os.open(new, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = new.rename(parent / f"{PREFIX}{os.getpid()}-{new.name.removeprefix(f'.{PREFIX}')}")
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def remove_abandoned(folder: Path) -> None:
    """Remove `folder` unless a run holds its lock, it belongs to another user, or it is not a folder."""
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(lock)


def device_memory_gib() -> float:
    """Memory of this GPU used by all processes."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30
