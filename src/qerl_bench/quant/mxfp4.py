"""quant=mxfp4: 4.25 bits per weight, the OCP Microscaling format; tensors as in compressed-tensors' MXFP4A16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.quant.base import BlockFormat
from qerl_bench.quant.foreign import COMPRESSED, Foreign, Part
from qerl_core.checks import check_fields, one_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class MXFP4(BlockFormat):
    """E2M1 codes and a power-of-two scale per 32 inputs. `scale_rule` picks the power from a block's maximum."""

    scale_rule: str

    block = 32
    bits_per_weight = 4 + 8 / block
    kernel_layout = "mxfp4"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "quant", scale_rule=one_of("even", "floor", "rceil"))

    def scales(
        self, weight: torch.Tensor, tensor_amax: float | None = None, stretch: float = 1.0
    ) -> dict[str, torch.Tensor]:
        from qerl_kernels import mxfp4

        self.require_finite(weight)
        return mxfp4.scales(weight, self.scale_rule, stretch)

    def unit(self, scales: dict[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
        from qerl_kernels import mxfp4

        return mxfp4.unit(scales)

    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        from qerl_kernels import e2m1

        return e2m1.nearest(values)

    def encode(self, weight: torch.Tensor, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from qerl_kernels import mxfp4

        return mxfp4.encode(weight, scales)

    def operand(self, packed: dict[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        from qerl_kernels import mxfp4

        return mxfp4.operand(packed["weight_packed"], packed["weight_scale"], dtype)

    def foreign(self) -> Foreign:
        scheme = {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "group",
            "group_size": self.block,
            "dynamic": False,
            "scale_dtype": "torch.uint8",
        }
        leaves = ("weight_packed", "weight_scale")
        return Foreign(method=COMPRESSED, names=("mxfp4-pack-quantized",), scheme=scheme, leaves=leaves, vllm=True)

    def parts(self, shape: tuple[int, int], in_words: bool) -> dict[str, Part]:
        import torch

        rows, width = shape
        codes = Part((rows, width // 2), torch.uint8)
        return {"weight_packed": codes, "weight_scale": Part((rows, width // self.block), torch.uint8)}
