"""Which kernels a card gets by its compute capability, as a table of kernels/README.md says, and from which Triton."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qerl_bench.model import kernels as model_kernels
from qerl_bench.model.kernels import require_compiler
from qerl_core.checks import ConfigError
from qerl_kernels import decode
from qerl_kernels.compilers import refusal
from qerl_kernels.decode_configs import WGMMA
from qerl_kernels.overlap import overlapping

README = Path(__file__).parents[2] / "kernels" / "README.md"
RELEASES = ("3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")
CUDA = torch.device("cuda")


def _rows() -> dict[tuple[int, int], list[str]]:
    """The cells behind the names of the cards, by compute capability."""
    lines = re.findall(r"^\| (\d+)\.(\d) \| [^|]+ \| (.*) \|$", README.read_text(), re.MULTILINE)
    return {(int(major), int(minor)): cells.split(" | ") for major, minor, cells in lines}


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)])
def test_the_table(capability: tuple[int, int], gpu: Callable[..., None]) -> None:
    gpu(get_device_capability=lambda _: capability)
    kernel, overlaps = decode.kernel_of.__wrapped__(CUDA), overlapping.__wrapped__(CUDA)["PDL"]
    assert kernel is not None
    assert _rows()[capability] == [
        f"`{kernel}`, {decode.MOST_TOKENS[kernel]} tokens",
        "decode GEMM" if kernel == WGMMA else "`jit_grouped`",
        "yes" if overlaps else "no",
        next(release for release in RELEASES if refusal(capability, release) is None),
        "unused" if capability >= (10, 0) else "none",
    ]


def test_cards_without_a_kernel(gpu: Callable[..., None], stand_in: Callable[..., None]) -> None:
    gpu(get_device_capability=lambda _: (7, 5))
    stand_in(decode, kernel_of=decode.kernel_of.__wrapped__)
    assert decode.kernel_of(CUDA) is None and decode.kernel_of(torch.device("cpu")) is None
    assert "capability of 8, 9, 10, 11, 12; use dequantize" in str(decode._unsupported(CUDA))


def test_a_compiler_with_a_known_fault_is_refused(gpu: Callable[..., None], stand_in: Callable[..., None]) -> None:
    release = "3.7.0+git1234"
    stand_in(model_kernels, find_spec=lambda _: True, version=lambda _: release)
    gpu(get_device_capability=lambda _: (10, 3))
    with pytest.raises(ConfigError, match=r"kernel=auto.*3\.7\.0.*10\.3.*issues/10590.*Triton 3\.7\.1.*kernel=torch"):
        require_compiler("auto", CUDA)
    require_compiler("torch", CUDA)
    require_compiler("auto", torch.device("cpu"))
    release = "3.10.0"
    require_compiler("auto", CUDA)
