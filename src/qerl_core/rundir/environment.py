"""Where a run's numbers come from: code, packages, machine and command, as env.json keeps them."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qerl_core.metrics.definitions import definitions
from qerl_core.options.user_options import folders, loaded_files
from qerl_core.process.gpu_share import of_allocator, runs_on_gpu
from qerl_core.rundir.checkout import git, uncommitted
from qerl_core.rundir.checksums import digest

PACKAGES = (
    *("torch", "transformers", "peft", "bitsandbytes", "triton", "gguf"),
    *("hydra-core", "lm-eval", "wandb", "numpy"),
)
COMPUTING = {  # packages whose code makes the numbers of a run: of each what counts, or None for all but what is named
    "qerl_kernels": None,
    "qerl_core": ("checks.py", "metrics", "process/device.py", "records.py", "seeding.py", "statistics.py"),
    "qerl_bench": None,
}
ARITHMETIC = (  # variables that choose how PyTorch and the libraries under it add and multiply
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
)
WITHOUT_NUMBERS = ("qerl_bench/commands", "qerl_bench/conduct", "qerl_bench/sweep")  # words, studies and launchers


@cache
def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Versions of the packages that affect the numbers; None for a package that is not installed. Read once: an
    upgrade does not change what a process has loaded."""
    installed: dict[str, str | None] = dict.fromkeys(packages)
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def environment(device: str) -> dict[str, Any]:
    """Code, packages, machine and command of this process, and the definitions of its metrics.

    Two runs come from the same code if their `code` is equal. `commit` does not tell: commits may differ in
    documentation alone, and uncommitted changes, `dirty`, have none. Without git it is null.
    """
    import torch

    changes = uncommitted()
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return {
        "commit": git("rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
        "code": code_digest(),
        "own_code": own_modules(),
        "own_folders": [str(folder.absolute()) for folder in folders()[1:]],
        "metrics": definitions(),
        "python": platform.python_version(),
        "packages": versions(),
        "platform": platform.platform(),
        "device": device,
        "cpu": cpu_name(),
        "gpu": gpu,
        "runs_on_gpu": runs_on_gpu() if gpu else None,  # of equal shares of its memory
        "allocator": of_allocator() if gpu else None,  # as PyTorch's variable says it
        "driver": nvidia_driver() if gpu else None,
        "kernel_tables": kernel_tables(gpu),
        "threads": torch.get_num_threads(),
        "argv": sys.argv,
    }


def kernel_tables(gpu: str | None) -> dict[str, str]:
    """The measured tables that choose kernels on `gpu`, by path, each with its SHA-256; none on a CPU."""
    from qerl_kernels.decode_configs import tables

    return {str(path): digest(path) for path in tables(gpu)} if gpu else {}


def code_digest() -> str:
    """First 12 hex digits of the SHA-256 of the Python sources that compute. Words, reports and launchers have none."""
    state = hashlib.sha256()
    for name, file in computing_files().items():
        state.update(f"{name}\0".encode() + file.read_bytes())
    return state.hexdigest()[:12]


def computing_files() -> dict[str, Path]:
    """The sources that the numbers of a run come from, by their names from their package on."""
    found = {}
    for package, parts in COMPUTING.items():
        root = folder_of(package)
        for file in sorted(root.rglob("*.py")):
            inside = file.relative_to(root)
            name = f"{package}/{inside.as_posix()}"
            counts = parts is None or any(inside.is_relative_to(part) for part in parts)
            if counts and not any(Path(name).is_relative_to(place) for place in WITHOUT_NUMBERS):
                found[name] = file
    return found


def folder_of(package: str) -> Path:
    """Where a package of ours lies, which is not imported for that."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def cpu_name(described: Path = Path("/proc/cpuinfo")) -> str | None:
    """The model of the processor, which decides the order in which a CPU adds numbers, and what the environment has
    arithmetic do otherwise; None if unknown."""
    try:
        lines = described.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next(names, platform.processor() or None)
    asked = [f"{one}={os.environ[one]}" for one in ARITHMETIC if os.environ.get(one)]
    return f"{name} with {', '.join(asked)}" if asked else name


def nvidia_driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0] or None
    except FileNotFoundError:
        return None


def own_modules() -> dict[str, str]:
    """Loaded modules of the folders in use, and files that options name: file, relative to its folder -> SHA-256."""
    _, *in_use = folders()
    loaded = [*sys.modules.values()] if in_use else []
    files = {Path(file) for module in loaded if (file := getattr(module, "__file__", None))}
    return {file.name: digest(file) for file in loaded_files()} | {
        str(file.relative_to(folder)): digest(file)
        for folder in in_use
        for file in sorted(files)
        if file.is_relative_to(folder)
    }
