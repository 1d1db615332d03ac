"""quant=nf4: 4.5 bits per weight, QLoRA's format, in the bytes of bitsandbytes and decoded by it.

The baseline of the QeRL paper. The scales stay FP32 unless `double_quant` is on (4.127 bits): a comparison of formats
would otherwise be one of scale compression too. `backend=bitsandbytes` multiplies as QLoRA does, for comparisons of
speed with it; the weights are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from qerl_bench.checks import require, require_package
from qerl_bench.quant.base import require_blocks, require_finite

if TYPE_CHECKING:
    import torch
    from bitsandbytes.functional import QuantState

BLOCK = 64
NESTED_BLOCK = 256  # scales per FP32 scale of scales
BACKENDS = ("own", "bitsandbytes")


@dataclass(frozen=True, kw_only=True)
class NF4:
    """Indices into a table of 16 normal quantiles and an FP32 scale per 64 inputs; first input in the high nibble.

    Resident tensors are bitsandbytes' own: `weight` uint8 (N*K/2, 1) and `absmax` FP32 (N*K/64,). With `double_quant`
    the scales are bytes in turn: `absmax` uint8, `nested_absmax` FP32 (N*K/16384,) and `nested_offset` FP32 (1,).
    """

    name: str
    double_quant: bool
    backend: str

    def __post_init__(self) -> None:
        require(self.name != "", "quant.name is empty; give the format a name, for example nf4")
        require(
            isinstance(self.double_quant, bool), f"quant.double_quant must be true or false, got {self.double_quant!r}"
        )
        require(
            self.backend in BACKENDS,
            f"quant.backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}; own takes the kernels of "
            "kernel=auto, bitsandbytes its own matmul",
        )

    @property
    def bits_per_weight(self) -> float | None:
        scale = 8 + 32 / NESTED_BLOCK if self.double_quant else 32
        return 4 + scale / BLOCK

    def unsupported_reason(self, device: str) -> str | None:
        if find_spec("bitsandbytes") is None:
            return "quant=nf4 needs the package bitsandbytes, which is not installed"
        return None

    def check_width(self, name: str, in_features: int) -> None:
        require_blocks(name, in_features, BLOCK, "NF4")

    @property
    def block(self) -> int:
        return BLOCK

    @property
    def kernel_layout(self) -> str | None:
        return None if self.double_quant or self.backend == "bitsandbytes" else "nf4"

    def scales(
        self, weight: torch.Tensor, tensor_amax: float | None = None, stretch: float = 1.0
    ) -> dict[str, torch.Tensor]:
        from qerl_kernels import nf4

        require_finite(weight, "NF4")
        return nf4.scales(weight, stretch)

    def unit(self, scales: dict[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
        return scales["absmax"].view(shape[0], -1)

    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        from qerl_kernels import nf4

        return nf4.nearest(values)

    def encode(self, weight: torch.Tensor, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Codes are chosen under the FP32 scales, as in bitsandbytes; double quantization rounds those afterwards."""
        require_package("bitsandbytes", "quant=nf4", "bitsandbytes")
        from qerl_kernels import nf4

        codes = {"weight": nf4.encode(weight, scales)}
        if not self.double_quant:
            return codes | scales
        from bitsandbytes.functional import quantize_blockwise

        offset = scales["absmax"].mean()
        absmax, state = quantize_blockwise(scales["absmax"] - offset, blocksize=NESTED_BLOCK)
        return codes | {"absmax": absmax, "nested_absmax": state.absmax, "nested_offset": offset.reshape(1)}

    def pack(self, weight: torch.Tensor, tensor_amax: float | None = None) -> dict[str, torch.Tensor]:
        return self.encode(weight, self.scales(weight, tensor_amax))

    def operand(self, packed: dict[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(packed["weight"], quant_state(packed, shape, dtype))

    def output_scale(self, packed: dict[str, torch.Tensor]) -> float:
        return 1.0

    def multiply(
        self, x: torch.Tensor, packed: dict[str, torch.Tensor], shape: tuple[int, int], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x (..., K) to (..., N) by bitsandbytes' `matmul_4bit`, differentiable in x."""
        from bitsandbytes import matmul_4bit  # type: ignore[reportPrivateImportUsage]  # its documented place

        state = quant_state(packed, shape, x.dtype)
        return matmul_4bit(x, packed["weight"], state, bias=None if bias is None else bias.to(x.dtype))


def quant_state(
    packed: dict[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype, with_code: bool = False
) -> QuantState:
    """bitsandbytes' own record of how to decode `packed` to (N, K) in `dtype`; with its table if it is to be stored."""
    from bitsandbytes.functional import QuantState, get_4bit_type

    nested: dict[str, Any] = {}
    if with_code:
        nested["code"] = get_4bit_type("nf4", device=packed["weight"].device)
    if "nested_absmax" in packed:
        inner = packed["nested_absmax"]
        state = QuantState(inner, code=_dynamic_map(inner.device), blocksize=NESTED_BLOCK, dtype=inner.dtype)
        nested |= {"offset": packed["nested_offset"].squeeze(), "state2": state}
    return QuantState(packed["absmax"], shape=shape, blocksize=BLOCK, quant_type="nf4", dtype=dtype, **nested)


@cache
def _dynamic_map(device: torch.device) -> torch.Tensor:
    """The 256 values that an 8-bit scale can have (bitsandbytes' signed dynamic map)."""
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map().to(device)
