"""quant=nvfp4: 4.5 bits per weight, the format of the QeRL paper; bytes as compressed-tensors' NVFP4A16 writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.errors import require
from qerl_bench.quant.base import require_blocks, require_finite

if TYPE_CHECKING:
    import torch

BLOCK = 16
COMPUTE_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class NVFP4:
    """E2M1 codes, an E4M3 scale per 16 inputs, an FP32 scale per tensor.

    `compute_dtype` is the dtype in which the scales are computed. Bytes depend on it: llm-compressor uses the dtype of
    the checkpoint, so a BF16 checkpoint quantized in float32 differs in about 1 % of its block scales.
    """

    name: str
    compute_dtype: str

    def __post_init__(self) -> None:
        require(self.name != "", "quant.name is empty; give the format a name, for example nvfp4")
        require(
            self.compute_dtype in COMPUTE_DTYPES,
            f"quant.compute_dtype must be one of {', '.join(COMPUTE_DTYPES)}, got {self.compute_dtype!r}; "
            "use the dtype of the checkpoint",
        )

    @property
    def bits_per_weight(self) -> float | None:
        return 4 + 8 / BLOCK

    def unsupported_reason(self, device: str) -> str | None:
        return None

    def check_width(self, name: str, in_features: int) -> None:
        require_blocks(name, in_features, BLOCK, "NVFP4")

    def pack(self, weight: torch.Tensor, tensor_amax: float | None = None) -> dict[str, torch.Tensor]:
        import torch

        from qerl_kernels import nvfp4

        dtype: torch.dtype = getattr(torch, self.compute_dtype)
        rounded = weight.to(dtype)
        require_finite(rounded, "NVFP4")
        return nvfp4.pack(rounded, dtype, tensor_amax)

    def operand(self, packed: dict[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        from qerl_kernels import nvfp4

        return nvfp4.operand(packed["weight_packed"], packed["weight_scale"], dtype)

    def output_scale(self, packed: dict[str, torch.Tensor]) -> float:
        return float(packed["weight_global_scale"].reciprocal())
