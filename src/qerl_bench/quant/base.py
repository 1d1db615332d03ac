"""What a weight format is: how one matrix is packed, and how its matmul operand is rebuilt.

A format spec is a frozen dataclass named by `_target_` in conf/quant/*.yaml. Specs import torch only inside their
methods, so the whole config grid composes without it. Bit-level work lives in `qerl_kernels`, beside the fast kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

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
        """Raise BadInput if the layer `name` has an input width that this format's blocks do not divide."""
        ...

    def pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Quantize W (N, K) to the tensors that stay resident, named as the checkpoint layout of the format names them."""
        ...

    def operand(self, packed: dict[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """The matmul operand (N, K) in `dtype`: W without its tensor-wide scale, so that W = `output_scale` * operand."""
        ...

    def output_scale(self, packed: dict[str, torch.Tensor]) -> float:
        """The tensor-wide scale, applied once to the matmul's output in FP32; 1.0 where the format has none."""
        ...
