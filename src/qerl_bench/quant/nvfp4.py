"""quant=nvfp4: 4.5 bits per weight, the format of the QeRL paper; bytes as in compressed-tensors or torchao."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.checks import require
from qerl_bench.quant.base import require_blocks, require_finite

if TYPE_CHECKING:
    import torch

BLOCK = 16
COMPUTE_DTYPES = ("bfloat16", "float16", "float32")
CONVENTIONS = ("compressed-tensors", "torchao")


@dataclass(frozen=True, kw_only=True)
class NVFP4:
    """E2M1 codes, an E4M3 scale per 16 inputs, an FP32 scale per tensor.

    `compute_dtype` is the dtype in which the scales are computed. Bytes depend on it: llm-compressor uses the dtype of
    the checkpoint, so a BF16 checkpoint quantized in float32 differs in about 1 % of its block scales. `convention`
    says whose arithmetic is followed; torchao and ModelOpt always compute in float32.
    """

    name: str
    compute_dtype: str
    convention: str

    def __post_init__(self) -> None:
        require(self.name != "", "quant.name is empty; give the format a name, for example nvfp4")
        require(
            self.compute_dtype in COMPUTE_DTYPES,
            f"quant.compute_dtype must be one of {', '.join(COMPUTE_DTYPES)}, got {self.compute_dtype!r}; "
            "use the dtype of the checkpoint",
        )
        require(
            self.convention in CONVENTIONS,
            f"quant.convention must be one of {', '.join(CONVENTIONS)}, got {self.convention!r}; "
            "checkpoints for vLLM follow compressed-tensors",
        )
        require(
            self.convention != "torchao" or self.compute_dtype == "float32",
            "quant.convention=torchao computes its scales in float32, got "
            f"quant.compute_dtype={self.compute_dtype}; add quant.compute_dtype=float32",
        )

    @property
    def bits_per_weight(self) -> float | None:
        return 4 + 8 / BLOCK

    def unsupported_reason(self, device: str) -> str | None:
        return None

    def check_width(self, name: str, in_features: int) -> None:
        require_blocks(name, in_features, BLOCK, "NVFP4")

    @property
    def block(self) -> int:
        return BLOCK

    @property
    def kernel_layout(self) -> str | None:
        return "nvfp4"

    def scales(
        self, weight: torch.Tensor, tensor_amax: float | None = None, stretch: float = 1.0
    ) -> dict[str, torch.Tensor]:
        from qerl_kernels import nvfp4

        rounded = weight.to(self._dtype)
        require_finite(rounded, "NVFP4")
        return nvfp4.scales(rounded, self._dtype, tensor_amax, self.convention, stretch)

    def unit(self, scales: dict[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
        from qerl_kernels import nvfp4

        return nvfp4.unit(scales)

    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        from qerl_kernels import e2m1

        return e2m1.nearest(values)

    def encode(self, weight: torch.Tensor, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from qerl_kernels import nvfp4

        return nvfp4.encode(weight, self._dtype, scales)

    def pack(self, weight: torch.Tensor, tensor_amax: float | None = None) -> dict[str, torch.Tensor]:
        return self.encode(weight, self.scales(weight, tensor_amax))

    @property
    def _dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.compute_dtype)

    def operand(self, packed: dict[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        from qerl_kernels import nvfp4

        return nvfp4.operand(packed["weight_packed"], packed["weight_scale"], dtype)

    def output_scale(self, packed: dict[str, torch.Tensor]) -> float:
        if "weight_scale_2" in packed:
            return float(packed["weight_scale_2"])
        return float(packed["weight_global_scale"].reciprocal())
