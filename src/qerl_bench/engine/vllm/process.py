"""Starting vLLM, in a process of its own or in this one, and stopping it so that nothing is left."""

# vLLM has an environment of its own, without a type checker.
# pyright: reportMissingImports=false
from __future__ import annotations

import fcntl
import gc
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qerl_bench.checks import require

if TYPE_CHECKING:
    from vllm import LLM

log = logging.getLogger(__name__)
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "qerl-bench-vllm-"
PATIENCE_S = 30.0  # for processes that were told to end


def start(folder: Path, isolation: str, **options: Any) -> LLM:
    """A vLLM engine on the checkpoint in `folder`. `options` are vLLM's own. Keeps this process's random state."""
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
        "another vLLM runs in this process, and only one can: close it first, or use engine.isolation=child",
    )
    with torch.random.fork_rng():  # vLLM seeds whatever process it computes in
        return LLM(
            model=str(folder),
            skip_tokenizer_init=True,  # a tokenizer of its own might read text differently
            generation_config="vllm",  # no sampling defaults from the checkpoint
            logprobs_mode="processed_logprobs",  # temperature included
            worker_cls="qerl_bench.engine.vllm.worker.Worker",
            additional_config={"qerl_bench_norm_dtype": "float32"},  # compiled graphs of others do not fit
            enable_prefix_caching=True,
            gpu_memory_utilization=0.01,  # of no effect: kv_cache_memory_bytes is given
            **options,
        )


def stop(llm: LLM, isolation: str, pids: list[int]) -> None:
    """Shut the engine down and wait until its processes `pids` are gone; those that stay are killed."""
    llm.llm_engine.engine_core.shutdown(timeout=PATIENCE_S)
    if isolation == "same":
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    gc.collect()
    left = wait_for(pids)
    for pid in left:
        log.warning("process %d of vLLM did not end when told to, so it is killed", pid)
        with suppress(ProcessLookupError):  # it ended just now
            os.kill(pid, signal.SIGKILL)
    assert not wait_for(left), f"processes {left} of vLLM cannot be ended"


def wait_for(pids: list[int]) -> list[int]:
    """Those of `pids` that have not ended within PATIENCE_S."""
    end = time.monotonic() + PATIENCE_S
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def is_running(pid: int) -> bool:
    """Whether the process exists and is not just waiting to be collected by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def exchange_folder(needed: int) -> Iterator[Path]:
    """A new folder for adapters and norm scales while the context lasts, in memory where `needed` bytes fit.

    It is locked, so that a later run knows an abandoned one, which it removes: process numbers would say nothing where
    containers share the memory.
    """
    parent = SHARED_MEMORY
    if not os.access(parent, os.W_OK) or shutil.disk_usage(parent).free < needed:
        parent = Path(tempfile.gettempdir())
        log.info("%s has no room for %.1f MiB, so adapters go through %s", SHARED_MEMORY, needed / 2**20, parent)
    for old in parent.glob(f"{PREFIX}*"):
        remove_abandoned(old)
    new = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))  # found by nobody until it is locked
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
    """Remove `folder` unless a run holds it, it belongs to someone else, or it is no folder at all."""
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(lock)


def device_memory_gib() -> float:
    """What all processes together use of this GPU."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30
