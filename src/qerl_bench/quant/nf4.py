"""quant=nf4: 4.5 bits per weight, QLoRA's format, in the bytes of bitsandbytes and decoded by it.

The baseline of the QeRL paper. The scales stay FP32 unless `double_quant` is on (4.127 bits), so that a comparison of
formats is not also one of scale compression. `backend=bitsandbytes` multiplies as QLoRA does, to compare speeds with
it; the weights are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from qerl_bench.quant.base import BlockFormat
from qerl_bench.quant.foreign import BITSANDBYTES, Foreign
from qerl_core.checks import check_fields, flag, lacking, one_of, require, require_package

if TYPE_CHECKING:
    import torch
    from bitsandbytes.functional import QuantState

NESTED_BLOCK = 256  # 8-bit scales per FP32 scale, with double quantization


@dataclass(frozen=True, kw_only=True)
class NF4(BlockFormat):
    """Indices into a table of 16 normal quantiles and an FP32 scale per 64 inputs; first input in the high nibble.

    Resident tensors are those of bitsandbytes: `weight` uint8 (N*K/2, 1) and `absmax` FP32 (N*K/64,). With
    `double_quant`, `absmax` is uint8, and `nested_absmax` FP32 (N*K/16384,) and `nested_offset` FP32 (1,) decode it.
    """

    double_quant: bool
    backend: str

    block = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "quant", double_quant=flag, backend=one_of("own", "bitsandbytes"))

    @property
    def bits_per_weight(self) -> float:
        scale = 8 + 32 / NESTED_BLOCK if self.double_quant else 32
        return 4 + scale / self.block

    @property
    def kernel_layout(self) -> str | None:
        return None if self.double_quant or self.own_matmul else "nf4"

    @property
    def own_matmul(self) -> bool:
        return self.backend == "bitsandbytes"

    def unsupported_reason(self, device: str) -> str | None:
        if find_spec("bitsandbytes") is None:
            return lacking("bitsandbytes", "quant=nf4", "bitsandbytes")
        return None

    def scales(
        self, weight: torch.Tensor, tensor_amax: float | None = None, stretch: float = 1.0
    ) -> dict[str, torch.Tensor]:
        from qerl_kernels import nf4

        self.require_finite(weight)
        return nf4.scales(weight, stretch)

    def unit(self, scales: dict[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
        return scales["absmax"].view(shape[0], -1)

    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        from qerl_kernels import nf4

        return nf4.nearest(values)

    def encode(self, weight: torch.Tensor, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Codes are chosen under the FP32 scales, as in bitsandbytes; double quantization rounds the scales later."""
        require_package("bitsandbytes", "quant=nf4", "bitsandbytes")
        from qerl_kernels import nf4

        codes = {"weight": nf4.encode(weight, scales)}
        if not self.double_quant:
            return codes | scales
        from bitsandbytes.functional import quantize_blockwise

        offset = scales["absmax"].mean()
        absmax, state = quantize_blockwise(scales["absmax"] - offset, blocksize=NESTED_BLOCK)
        return codes | {"absmax": absmax, "nested_absmax": state.absmax, "nested_offset": offset.reshape(1)}

    def operand(self, packed: dict[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(packed["weight"], quant_state(packed, shape, dtype))

    def multiply(
        self, x: torch.Tensor, packed: dict[str, torch.Tensor], shape: tuple[int, int], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """By bitsandbytes' `matmul_4bit`."""
        from bitsandbytes import matmul_4bit  # type: ignore[reportPrivateImportUsage]  # documented there

        state = quant_state(packed, shape, x.dtype)
        return matmul_4bit(x, packed["weight"], state, bias=None if bias is None else bias.to(x.dtype))

    def foreign(self) -> Foreign:
        scheme = {
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": self.double_quant,
            "bnb_4bit_quant_storage": "uint8",
        }
        return Foreign(method=BITSANDBYTES, names=("nf4",), scheme=scheme)

    def stored(self, packed: dict[str, torch.Tensor], shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        import torch

        state = quant_state(packed, shape, torch.bfloat16, with_code=True).as_dict(packed=True)
        return {"weight": packed["weight"]} | {f"weight.{key}": tensor for key, tensor in state.items()}

    def check_stored(self, where: str, said: list[dict[str, Any]]) -> None:
        for part in said:
            double = bool(part.get("bnb_4bit_use_double_quant"))
            require(
                self.double_quant == double,
                f"{where} has bnb_4bit_use_double_quant={double}; use quant.double_quant={str(double).lower()}",
            )


def quant_state(
    packed: dict[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype, with_code: bool = False
) -> QuantState:
    """What bitsandbytes needs to decode `packed` to (N, K) in `dtype`; `with_code` adds the table, for checkpoints."""
    from bitsandbytes.functional import QuantState, get_4bit_type

    nested: dict[str, Any] = {}
    if with_code:
        nested["code"] = get_4bit_type("nf4", device=packed["weight"].device)
    if "nested_absmax" in packed:
        inner = packed["nested_absmax"]
        state = QuantState(inner, code=_dynamic_map(inner.device), blocksize=NESTED_BLOCK, dtype=inner.dtype)
        nested |= {"offset": packed["nested_offset"].squeeze(), "state2": state}
    return QuantState(packed["absmax"], shape=shape, blocksize=NF4.block, quant_type="nf4", dtype=dtype, **nested)


@cache
def _dynamic_map(device: torch.device) -> torch.Tensor:
    """The 256 values of an 8-bit scale (bitsandbytes' signed dynamic map)."""
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map().to(device)
