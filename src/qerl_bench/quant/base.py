"""What a weight format is: how one matrix is packed, and how its matmul operand is rebuilt.

A format spec is a frozen dataclass named by `_target_` in conf/quant/*.yaml. Specs import torch only inside their
methods, so the whole config grid composes without it. Bit-level work lives in `qerl_kernels`, beside the fast kernels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from qerl_bench.checks import ConfigError, require

if TYPE_CHECKING:
    import torch


class WeightFormat(Protocol):
    """A storage format for the frozen linear weights W (N, K) of a model, K the input width."""

    @property
    def name(self) -> str: ...

    @property
    def bits_per_weight(self) -> float | None:
        """Resident bits per weight, scales included; None for a format that leaves the layers as they are."""
        ...

    def unsupported_reason(self, device: str) -> str | None:
        """Why this format cannot run on `device` ("cpu" or "cuda") on this machine, or None if it can."""
        ...

    def check_width(self, name: str, in_features: int) -> None:
        """Raise ConfigError if the layer `name` has an input width that this format's blocks do not divide."""
        ...

    @property
    def block(self) -> int:
        """How many neighbouring inputs share a scale; 0 for a format that leaves the layers as they are."""
        ...

    @property
    def kernel_layout(self) -> str | None:
        """The name under which `qerl_kernels.layout` knows this format, None if the fused kernels cannot read it."""
        ...

    def scales(
        self, weight: torch.Tensor, tensor_amax: float | None = None, stretch: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """The scale tensors of W (N, K) by the format's rule: from the maximum of each block, times `stretch`.

        `tensor_amax` is the largest |w| over the matrices that share one tensor-wide scale with W, None if W has one of
        its own; formats without such a scale ignore it. Raises ConfigError if W holds NaN or infinity.
        """
        ...

    def unit(self, scales: dict[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
        """What a grid value of 1 stands for under `scales`, FP32 (N, K/block): a weight is `unit` x a grid value."""
        ...

    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        """The grid value nearest to each FP32 value, rounded and saturated as the format does it."""
        ...

    def encode(self, weight: torch.Tensor, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """W (N, K) rounded under `scales` to the tensors that stay resident, named as the format's checkpoints do."""
        ...

    def pack(self, weight: torch.Tensor, tensor_amax: float | None = None) -> dict[str, torch.Tensor]:
        """W (N, K) rounded to nearest under its own scales: `encode` after `scales`, nothing else."""
        ...

    def operand(self, packed: dict[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """The matmul operand (N, K) in `dtype`: W without its tensor-wide scale; W is `output_scale` times it."""
        ...

    def output_scale(self, packed: dict[str, torch.Tensor]) -> float:
        """The tensor-wide scale, applied once to the matmul's output in FP32; 1.0 where the format has none."""
        ...


def require_blocks(name: str, in_features: int, block: int, format_name: str) -> None:
    """Raise ConfigError unless blocks of `block` inputs divide the width of the layer `name`."""
    require(
        in_features % block == 0,
        f"{name}: {format_name} quantizes blocks of {block} inputs, which do not divide this layer's input width "
        f"{in_features}; choose a model whose widths are multiples of {block}, or quant=bf16",
    )


def require_finite(weight: torch.Tensor, format_name: str) -> None:
    """Raise ConfigError if a weight is NaN or infinite, which no 4-bit code can express."""
    low, high = weight.aminmax()  # several times faster than isfinite, and NaN if there is one
    if math.isfinite(float(low)) and math.isfinite(float(high)):
        return
    count = weight.numel() - int(weight.isfinite().sum())
    raise ConfigError(
        f"{count} of {weight.numel()} weights are NaN or infinite as {weight.dtype}, and {format_name} has no code for "
        "them; repair the checkpoint, or choose a dtype of wider range if they overflowed"
    )
