"""quant=nf4: 4.5 bits per weight, QLoRA's format, quantized and decoded by bitsandbytes itself.

The baseline of the QeRL paper. The scales stay FP32: double quantization (4.127 bits) is left out, because it would
compare scale compression as well as code tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from qerl_bench.errors import require, require_package
from qerl_bench.quant.base import require_blocks, require_finite

if TYPE_CHECKING:
    import torch

BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class NF4:
    """Indices into a table of 16 normal quantiles and an FP32 scale per 64 inputs; first input in the high nibble.

    Resident tensors are bitsandbytes' own: `weight` uint8 (N*K/2, 1) and `absmax` FP32 (N*K/64,).
    """

    name: str

    def __post_init__(self) -> None:
        require(self.name != "", "quant.name is empty; give the format a name, for example nf4")

    @property
    def bits_per_weight(self) -> float | None:
        return 4 + 32 / BLOCK

    def unsupported_reason(self, device: str) -> str | None:
        if find_spec("bitsandbytes") is None:
            return "quant=nf4 needs the package bitsandbytes, which is not installed"
        return None

    def check_width(self, name: str, in_features: int) -> None:
        require_blocks(name, in_features, BLOCK, "NF4")

    def pack(self, weight: torch.Tensor, tensor_amax: float | None = None) -> dict[str, torch.Tensor]:
        require_package("bitsandbytes", "quant=nf4", "bitsandbytes")
        from bitsandbytes.functional import quantize_4bit

        require_finite(weight, "NF4")
        codes, state = quantize_4bit(weight.contiguous(), blocksize=BLOCK, compress_statistics=False, quant_type="nf4")
        return {"weight": codes, "absmax": state.absmax}

    def operand(self, packed: dict[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        from bitsandbytes.functional import QuantState, dequantize_4bit

        state = QuantState(packed["absmax"], shape=shape, blocksize=BLOCK, quant_type="nf4", dtype=dtype)
        return dequantize_4bit(packed["weight"], state)

    def output_scale(self, packed: dict[str, torch.Tensor]) -> float:
        return 1.0
