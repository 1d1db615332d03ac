"""quant=fp8, int8 and int4: codes times a floating-point scale, the formats that most packed checkpoints have.

Bytes are those of compressed-tensors, or of torchao; the rule and its variants are in `qerl_kernels.symmetric`. Left
out: INT4 with offsets, as AWQ and GPTQ store it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from qerl_bench.quant.base import BlockFormat
from qerl_bench.quant.foreign import COMPRESSED, Foreign, Part
from qerl_bench.quant.weight_files import REMEDY
from qerl_core.checks import Check, check_fields, one_of, require

if TYPE_CHECKING:
    import torch

    from qerl_kernels.symmetric import Codes

SQUARE = "128x128"


@dataclass(frozen=True, kw_only=True)
class Symmetric(BlockFormat):
    """A code per weight, and a scale per row (`block=row`), per `block` inputs, or per square of weights.

    `compute_dtype` is the dtype in which the scales are computed, and stored unless `convention` stores them in FP32;
    llm-compressor uses the dtype of the checkpoint.
    """

    block: int | str
    compute_dtype: str
    convention: str

    kind: ClassVar[str]  # a key of `qerl_kernels.symmetric.CODES`
    bits: ClassVar[int]
    blocks: ClassVar[Check]
    names: ClassVar[tuple[str, ...]]  # in compressed-tensors
    leaves: ClassVar[tuple[str, ...]] = ("weight", "weight_scale")
    dtype: ClassVar[str]  # of codes one by one, in files

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            "quant",
            block=self.blocks,
            compute_dtype=one_of("bfloat16", "float16", "float32"),
            convention=one_of("compressed-tensors", "torchao"),
        )

    @property
    def bits_per_weight(self) -> float:
        """Without the scales of rows, which add 16 or 32 bits to a row."""
        scale = 32 if self.compute_dtype == "float32" or (self.convention == "torchao" and self.bits == 8) else 16
        weights = {"row": float("inf"), SQUARE: 128 * 128}.get(str(self.block)) or float(self.block)
        return self.bits + scale / weights

    @property
    def kernel_layout(self) -> str | None:
        """Fused kernels multiply by the scales of blocks in bfloat16; those of rows may have any dtype."""
        if self.block == "row":
            return self.kind
        in_fp32 = self.convention == "torchao" and self.bits == 8
        unknown = in_fp32 or self.compute_dtype != "bfloat16" or self.kind == "int8"
        return None if unknown else f"{self.kind}-{self.block}"

    @property
    def block_rows(self) -> int:
        return 128 if self.block == SQUARE else 1

    def block_of(self, in_features: int) -> int:
        return {"row": in_features, SQUARE: 128}.get(str(self.block)) or int(self.block)

    def scales(
        self, weight: torch.Tensor, tensor_amax: float | None = None, stretch: float = 1.0
    ) -> dict[str, torch.Tensor]:
        from qerl_kernels import symmetric

        rounded = weight.to(self._dtype)
        self.require_finite(rounded)
        block = self.block_rows, self.block_of(weight.shape[1])
        return symmetric.scales(rounded, self.codes, block, self._dtype, self.convention, stretch)

    def unit(self, scales: dict[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
        from qerl_kernels import symmetric

        return symmetric.unit(scales["weight_scale"], shape[0], self.block_rows)

    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        from qerl_kernels import symmetric

        return symmetric.nearest(values, self.codes)

    def encode(self, weight: torch.Tensor, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from qerl_kernels import symmetric

        return symmetric.encode(weight, scales, self.codes, self.block_rows, self._dtype, self.convention)

    def operand(self, packed: dict[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        from qerl_kernels import symmetric

        return symmetric.operand(packed, self.codes, self.block_rows, shape, dtype)

    def foreign(self) -> Foreign:
        strategy = {"row": "channel", SQUARE: "block"}.get(str(self.block), "group")
        scheme = {
            "num_bits": self.bits,
            "type": "float" if self.kind == "fp8" else "int",
            "symmetric": True,
            "strategy": strategy,
            "group_size": self.block if strategy == "group" else None,
            "block_structure": [128, 128] if strategy == "block" else None,
            "dynamic": False,
        }
        return Foreign(method=COMPRESSED, names=self.names, scheme=scheme, leaves=self.leaves, codes=self.dtype)

    def check_stored(self, where: str, said: list[dict[str, Any]]) -> None:
        for weights in said:
            size = weights.get("group_size")
            block = {"channel": "row", "block": SQUARE}.get(str(weights.get("strategy")), size)
            require(
                block == self.block or not self.blocks.allowed(block),
                f"{where} has scales for blocks of another size; use quant.block={block}",
            )

    def parts(self, shape: tuple[int, int], in_words: bool) -> dict[str, Part]:
        import torch

        rows, width = shape
        codes = Part(shape, {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}.get(self.dtype))
        if in_words or self.leaves[0] == "weight_packed":
            codes = Part((rows, width * self.bits // 32), torch.int32)
        scales = Part((-(-rows // self.block_rows), width // self.block_of(width)), None)
        return {self.leaves[0]: codes, "weight_scale": scales}

    def restored(self, layer: str, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        import torch

        scale, codes = stored["weight_scale"], stored[self.leaves[0]]
        in_floats = scale.dtype in (torch.bfloat16, torch.float16, torch.float32)
        finite = in_floats and bool(scale.isfinite().all())
        require(
            finite and (codes.dtype != torch.float8_e4m3fn or bool(codes.float().isfinite().all())),
            f"{layer} has a scale or weight that is infinite or not a number, or scales of integers or powers of two; "
            f"{REMEDY}",
        )
        return stored

    @cached_property
    def codes(self) -> Codes:
        from qerl_kernels.symmetric import CODES

        return CODES[self.kind]

    @property
    def _dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.compute_dtype)


class FP8(Symmetric):
    """E4M3 floats, a scale per row or per 128 x 128 weights."""

    kind, bits, blocks = "fp8", 8, one_of("row", SQUARE)
    names, dtype = ("float-quantized",), "F8_E4M3"


class INT8(Symmetric):
    """Integers from -128 to 127, a scale per row or per 128 inputs."""

    kind, bits, blocks = "int8", 8, Check(lambda value: value in ("row", 128), "row or 128")
    names, dtype = ("pack-quantized", "int-quantized"), "I8"

    def stored(self, packed: dict[str, torch.Tensor], shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        import torch

        from qerl_kernels.symmetric import swap_sign

        words = swap_sign(packed["weight"]).view(torch.int32)
        return {
            "weight_shape": torch.tensor(shape),
            "weight_packed": words,
            "weight_scale": packed["weight_scale"],
        }

    def restored(self, layer: str, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        import torch

        from qerl_kernels.symmetric import swap_sign

        codes = super().restored(layer, stored)["weight"]
        return stored | {"weight": swap_sign(codes.view(torch.int8)) if codes.dtype == torch.int32 else codes}


class INT4(Symmetric):
    """Integers from -8 to 7, a scale per 32 or 128 inputs."""

    kind, bits, blocks = "int4", 4, Check(lambda value: value in (32, 128), "32 or 128")
    names, leaves, dtype = ("pack-quantized",), ("weight_packed", "weight_scale"), ""

    def stored(self, packed: dict[str, torch.Tensor], shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        import torch

        return packed | {"weight_shape": torch.tensor(shape)}
