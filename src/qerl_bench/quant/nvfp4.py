"""quant=nvfp4: 4.5 bits per weight, the format of the QeRL paper; bytes as in compressed-tensors or torchao."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.quant.base import BlockFormat
from qerl_bench.quant.foreign import COMPRESSED, Foreign, Part
from qerl_bench.quant.weight_files import REMEDY
from qerl_core.checks import check_fields, one_of, require

if TYPE_CHECKING:
    import torch

_MAX_SCALE = 0x7E  # 448 as E4M3; larger bytes are NaN or negative


@dataclass(frozen=True, kw_only=True)
class NVFP4(BlockFormat):
    """E2M1 codes, an E4M3 scale per 16 inputs, an FP32 scale per tensor.

    `compute_dtype` is the dtype in which the scales are computed, and changes bytes: llm-compressor uses the dtype of
    the checkpoint, so a BF16 checkpoint quantized in float32 differs in about 1 % of its block scales. `convention`
    names the library whose arithmetic is followed; torchao and ModelOpt always compute in float32.
    """

    compute_dtype: str
    convention: str

    block = 16
    bits_per_weight = 4 + 8 / block
    kernel_layout = "nvfp4"
    tensor_scale = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            "quant",
            compute_dtype=one_of("bfloat16", "float16", "float32"),
            convention=one_of("compressed-tensors", "torchao"),
        )
        require(
            self.convention != "torchao" or self.compute_dtype == "float32",
            "quant.convention=torchao computes its scales in float32, got "
            f"quant.compute_dtype={self.compute_dtype}; add quant.compute_dtype=float32",
        )

    def scales(
        self, weight: torch.Tensor, tensor_amax: float | None = None, stretch: float = 1.0
    ) -> dict[str, torch.Tensor]:
        from qerl_kernels import nvfp4

        rounded = weight.to(self._dtype)
        self.require_finite(rounded)
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

    def operand(self, packed: dict[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        from qerl_kernels import nvfp4

        return nvfp4.operand(packed["weight_packed"], packed["weight_scale"], dtype)

    def output_scale(self, packed: dict[str, torch.Tensor]) -> float:
        if "weight_scale_2" in packed:  # torchao's multiplier; compressed-tensors stores the divisor
            return float(packed["weight_scale_2"])
        return float(packed["weight_global_scale"].reciprocal())

    def foreign(self) -> Foreign:
        scheme = {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "tensor_group",
            "group_size": self.block,
            "dynamic": False,
            "scale_dtype": "torch.float8_e4m3fn",
        }
        leaves = ("weight_packed", "weight_scale", "weight_global_scale")
        names = ("nvfp4-pack-quantized",)
        return Foreign(method=COMPRESSED, names=names, scheme=scheme, leaves=leaves, codes="U8", vllm=True)

    def stored(self, packed: dict[str, torch.Tensor], shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        if "weight_scale_2" not in packed:
            return packed
        others = {name: tensor for name, tensor in packed.items() if name != "weight_scale_2"}
        return others | {"weight_global_scale": packed["weight_scale_2"].reciprocal()}

    def parts(self, shape: tuple[int, int], in_words: bool) -> dict[str, Part]:
        import torch

        rows, width = shape
        scale = Part((rows, width // self.block), torch.float8_e4m3fn)
        whole = dict.fromkeys(("weight_global_scale", "weight_scale_2"), Part((1,), torch.float32))
        return {"weight_packed": Part((rows, width // 2), torch.uint8), "weight_scale": scale} | whole

    def restored(self, layer: str, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        import torch

        largest = int(stored["weight_scale"].view(torch.uint8).max())
        ok = 0 < self.output_scale(stored) < float("inf") and largest <= _MAX_SCALE
        require(ok, f"{layer} has a scale that is zero, negative, infinite or not a number; {REMEDY}")
        return stored

    @property
    def _dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.compute_dtype)
