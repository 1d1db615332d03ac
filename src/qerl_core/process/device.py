"""The device of a run, and a timer that measures time and peak memory of the phases of a step."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from qerl_core.checks import ConfigError
from qerl_core.process.cards import no_gpu
from qerl_core.process.out_of_memory import memory_for
from qerl_core.process.progress import phase


def resolve_device(wanted: str) -> str:
    """Turn auto | cpu | cuda into "cpu" or "cuda". Raises ConfigError if `wanted` is cuda and there is no GPU."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError(no_gpu())
    return "cuda" if wanted != "cpu" and available else "cpu"


def device_name(wanted: str) -> str:
    """What a process finds for `wanted`: "cpu", a GPU with its memory, or "no GPU"."""
    if wanted == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        return "no GPU"
    return f"{torch.cuda.get_device_name()}, {torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB"


BF16_UNITS = {"avx512_bf16", "amx_bf16", "bf16"}  # flags of x86 and ARM processors in /proc/cpuinfo


def multiplies_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool | None:
    """Whether the processor has instructions that multiply BF16; None if unknown."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), None)
    return None if flags is None else not BF16_UNITS.isdisjoint(flags)


_earlier = [0.0, 0.0]  # `peaks` of the phase that goes on, up to the latest `peak_bytes`, which measures anew


class PhaseTimer:
    """Seconds and peak memory (GiB) of the named phases of one step: `with timer("train"): ...`.

    A phase that is entered several times adds up its seconds. The GPU is synchronized at both ends of a phase.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.peak_gib: dict[str, float] = {}
        self.reserved_gib: dict[str, float] = {}  # on a GPU: what PyTorch's allocator held at most, in use or not

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        _earlier[:] = 0.0, 0.0
        reset_peak(self.device)
        started = now(self.device)
        with memory_for(name), phase(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + now(self.device) - started
        used, held = (max(pair) for pair in zip(peaks(self.device), _earlier, strict=True))
        self.peak_gib[name] = max(self.peak_gib.get(name, 0.0), used)
        if self.device == "cuda":
            self.reserved_gib[name] = max(self.reserved_gib.get(name, 0.0), held)


@contextmanager
def tf32_matmuls(on: bool) -> Iterator[None]:
    """Inside, if `on`, FP32 matmuls read the first 10 bits of a mantissa where the device's tensor cores do so."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if on else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def bf16_matmuls(on: bool, device: str) -> torch.autocast:
    """Inside, if `on`, operations with weights in FP32 compute in BF16 where torch.autocast does so.

    Rounded weights are not kept for a second use: a recorded pass would find them as they were when it was recorded.
    """
    return torch.autocast(device, torch.bfloat16, enabled=on, cache_enabled=False)


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak(device: str) -> None:
    """Start a new peak measurement. Where that is not allowed, the peak is that of the whole process."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_gib(device: str) -> float:
    """Peak since `reset_peak` in GiB: allocated GPU memory, or resident memory of the process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    try:
        peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        peak = None
    if peak is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return int(peak[1]) / 2**20


def peaks(device: str) -> tuple[float, float]:
    """Peaks since `reset_peak` in GiB: of what is in use, and on a GPU of what PyTorch's allocator holds, else 0."""
    return peak_gib(device), torch.cuda.max_memory_reserved() / 2**30 if device == "cuda" else 0.0


def peak_bytes(device: str, work: Callable[[], object]) -> int:
    """How much more memory than before was allocated at once during `work`. A phase around it keeps its own peak."""
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    _earlier[:] = map(max, _earlier, peaks(device))
    reset_peak(device)
    work()
    return int(peak_gib(device) * 2**30) - before


def random_state(device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """PyTorch's random numbers as they are now, of the CPU and of the GPU, if that is the device."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if device == "cuda" else None


def set_random_state(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """Go back to the numbers of `random_state`."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
