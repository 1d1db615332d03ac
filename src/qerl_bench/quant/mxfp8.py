"""quant=mxfp8: 8.25 bits per weight, OCP Microscaling with E4M3 codes; tensors as in compressed-tensors' MXFP8A16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.quant.base import BlockFormat
from qerl_bench.quant.foreign import COMPRESSED, Foreign, Part
from qerl_bench.quant.weight_files import REMEDY
from qerl_core.checks import require

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class MXFP8(BlockFormat):
    """E4M3 codes and a power-of-two scale per 32 inputs, by the floor rule. The fused kernels have no layout for it."""

    block = 32
    bits_per_weight = 8 + 8 / block

    def scales(
        self, weight: torch.Tensor, tensor_amax: float | None = None, stretch: float = 1.0
    ) -> dict[str, torch.Tensor]:
        from qerl_kernels import mxfp8

        self.require_finite(weight)
        return mxfp8.scales(weight, stretch)

    def unit(self, scales: dict[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
        from qerl_kernels import mxfp8

        return mxfp8.unit(scales)

    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        from qerl_kernels import mxfp8

        return mxfp8.nearest(values)

    def encode(self, weight: torch.Tensor, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from qerl_kernels import mxfp8

        return mxfp8.encode(weight, scales)

    def operand(self, packed: dict[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        from qerl_kernels import mxfp8

        return mxfp8.operand(packed, dtype)

    def foreign(self) -> Foreign:
        scheme = {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "group",
            "group_size": self.block,
            "dynamic": False,
            "scale_dtype": "torch.uint8",
        }
        leaves = ("weight", "weight_scale")
        return Foreign(method=COMPRESSED, names=("mxfp8-quantized",), scheme=scheme, leaves=leaves, codes="F8_E4M3")

    def parts(self, shape: tuple[int, int], in_words: bool) -> dict[str, Part]:
        import torch

        rows, width = shape
        scales = Part((rows, width // self.block), torch.uint8)
        return {"weight": Part(shape, torch.float8_e4m3fn), "weight_scale": scales}

    def restored(self, layer: str, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        import torch

        from qerl_kernels import mxfp8

        finite = bool(mxfp8.operand(stored, torch.float32).isfinite().all())
        require(finite, f"{layer} has a scale or weight that is infinite or not a number; {REMEDY}")
        return stored
