"""How much of a GPU this process may take: all that is free, or an equal share where launchers run several on it.

PyTorch's allocator is told the share. So a run that needs more notices it by itself, and takes nothing from its
neighbours. A launcher sets RUNS_ON_GPU for the runs that it starts; a user who starts several by hand sets it too. Left
out: shares of different sizes, and the memory of vLLM, which `engine.kv_cache_gib` limits.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping

from qerl_core.checks import require

RUNS_ON_GPU = "QERL_BENCH_RUNS_ON_GPU"
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # of PyTorch; vLLM reads the first alone
CONTEXT_BYTES = 2**30  # of a process, beside what PyTorch allocates: CUDA's context, kernels, libraries


def neighbours(slot: int, slots: int, gpus: int) -> int:
    """How many of `slots` slots are on the GPU of `slot`, where slots go round the `gpus` GPUs."""
    return len(range(slot % gpus, slots, gpus))


def runs_on_gpu(environment: Mapping[str, str] = os.environ) -> int:
    """How many runs share the GPU. Raises ConfigError for anything but a number of at least 1."""
    said = environment.get(RUNS_ON_GPU, "1")
    require(
        said.isdecimal() and int(said) > 0,
        f"{RUNS_ON_GPU}={said} must be a whole number of at least 1, how many runs share a GPU; unset it if none do",
    )
    return int(said)


def of_allocator(environment: Mapping[str, str] = os.environ) -> str | None:
    """What the environment asks of PyTorch's allocator, by the name that PyTorch reads first; None: nothing."""
    return next((environment[name] for name in ALLOCATOR if name in environment), None)


def share_bytes(total: int) -> int:
    """What PyTorch may allocate of a GPU with `total` bytes."""
    runs = runs_on_gpu()
    if runs == 1:
        return total
    share = total // runs
    return share - min(CONTEXT_BYTES, share // 4)


def keep_to_share() -> None:
    """Let PyTorch raise OutOfMemoryError where this process would take more than its share of the GPU."""
    import torch

    if runs_on_gpu() > 1:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(share_bytes(total) / total)


def free_bytes() -> int:
    """Bytes that PyTorch may still take of the GPU: those that no process has, at most those left of the share."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return max(0, min(free, share_bytes(total) - torch.cuda.memory_reserved()))


def keepable_bytes(wanted: float, device: str) -> float:
    """How much of `wanted` bytes sampling may keep while training works: of a shared GPU, a quarter of the share."""
    import torch

    if device != "cuda" or runs_on_gpu() == 1:
        return wanted
    return min(wanted, share_bytes(torch.cuda.mem_get_info()[1]) / 4)


def spare_bytes() -> int:
    """Bytes that PyTorch has taken and can use for anything: nothing lies there, and no recording owns them."""
    import torch

    everybodys = [piece for piece in torch.cuda.memory_snapshot() if tuple(piece["segment_pool_id"]) == (0, 0)]
    return sum(piece["total_size"] - piece["allocated_size"] for piece in everybodys)


def release() -> None:
    """Free what nothing needs any more, and give back what PyTorch holds of the GPU without using it.

    Call it after a shortage, outside of `except`: until then its traceback holds all that was computed.
    """
    import torch

    gc.collect()  # tracebacks refer to themselves
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
