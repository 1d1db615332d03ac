"""Which GPUs there are, and what `device` may be, found without PyTorch, whose import takes seconds.

Left out: what PyTorch itself then finds, with its own driver and CUDA (process/device.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from qerl_core.checks import ConfigError, one_of

DEVICES = ("auto", "cpu", "cuda")
CHOICE = "CUDA_VISIBLE_DEVICES"
DRIVER_FILES = ("nvidia*", "nvhost*", "nvmap", "dxg", "kfd")  # in /dev of Linux where some driver of GPUs is loaded


def visible_gpus() -> list[str]:
    """Ids of the GPUs that runs may use: CUDA_VISIBLE_DEVICES, or else what nvidia-smi lists."""
    chosen = os.environ.get(CHOICE)
    return [*listed_gpus()] if chosen is None else [gpu for gpu in chosen.split(",") if gpu.strip()]


def listed_gpus() -> dict[str, str]:
    """The names of all GPUs that nvidia-smi lists, by number; none without it."""
    query = ["nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True)
    except FileNotFoundError:
        return {}
    rows = (line.partition(",") for line in listed.stdout.splitlines() if listed.returncode == 0)
    return {index.strip(): name.strip() for index, _, name in rows}


class DeviceCheck:
    """check(key, value) raises ConfigError, which names the GPUs too, unless `value` is one of DEVICES."""

    what = one_of(*DEVICES).what

    def __call__(self, key: str, value: object) -> None:
        if value not in DEVICES:
            raise ConfigError(f"{key} must be {self.what}, got {value!r}. {gpus_in_words()}")


def require_gpu(device: object) -> None:
    """Raise ConfigError for device=cuda where it is certain, before PyTorch is asked, that it would find no GPU."""
    hidden = os.environ.get(CHOICE, "0").split(",")[0].strip() in ("", "-1")
    driver = sys.platform != "linux" or any(file for kind in DRIVER_FILES for file in Path("/dev").glob(kind))
    if device == "cuda" and (hidden or not driver):
        raise ConfigError(no_gpu())


def no_gpu() -> str:
    """What is said of device=cuda where PyTorch finds no GPU."""
    return f"device=cuda, but PyTorch finds no GPU. {gpus_in_words()}"


def gpus_in_words() -> str:
    """The GPUs of this machine, what CUDA_VISIBLE_DEVICES leaves of them, and what to write for `device`."""
    listed, chosen = listed_gpus(), os.environ.get(CHOICE)
    there = ", ".join(f"{index} ({name})" for index, name in listed.items())
    if not there:
        return "nvidia-smi lists no GPU on this machine: use device=cpu"
    if chosen is not None:
        takes = f"device=cuda takes the first that {CHOICE}={chosen!r} names"
        return f"The GPUs are {there}: {takes}; leave that out to see all, or use device=cpu"
    return f"The GPUs are {there}: device=cuda takes the first, with {CHOICE}=NUMBER another; or use device=cpu"
