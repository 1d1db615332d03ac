"""The energy that a GPU has taken, from the counter of its driver: read twice, with nothing that polls in between.

The counter is of the whole GPU, other processes included. Left out: the CPU, several GPUs, parts of a GPU (MIG), and
GPUs before Volta, which have no counter.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

LIBRARY = "libnvidia-ml.so.1"  # NVML, which comes with the driver
JOULES = 1e-3  # NVML counts in millijoules


def counter(device: str, library: str = LIBRARY) -> float | None:
    """Joules that the GPU `device` has taken since its driver was loaded; None if nothing counts them.

    See nvmlDeviceGetTotalEnergyConsumption in NVIDIA's NVML API reference. NVML numbers GPUs differently from CUDA, so
    that the GPU is found by its UUID.
    """
    if not device.startswith("cuda"):
        return None
    import torch

    with suppress(OSError, AttributeError):  # no such library, or one without a function
        return _energy(ctypes.CDLL(library), f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return None


def _energy(nvml: ctypes.CDLL, uuid: str) -> float | None:
    """The counter of one GPU in joules; None if NVML refuses any of the calls."""
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    if nvml.nvmlInit_v2():
        return None
    try:
        failed = nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
        failed = failed or nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        return None if failed else JOULES * millijoules.value
    finally:
        nvml.nvmlShutdown()
