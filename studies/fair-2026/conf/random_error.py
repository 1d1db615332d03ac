"""quant=random-error: each row of a weight moved as far as `like` would move it, in a random direction.

The error has the size of that format's without its structure: no blocks, no grid, no dead zone. It is drawn from a seed
of the weight itself, so a copy of a model has one error, on every device. The result is stored in INT8 for the sake of
its fused kernels, whose own error is small beside one of 4 bits.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from qerl_bench.quant.base import BlockFormat
from qerl_bench.quant.symmetric import INT8
from qerl_core.checks import ConfigError, check_fields, number, require
from qerl_core.seeding import derive


@dataclass(frozen=True, kw_only=True)
class RandomError(INT8):
    """W + E: in each row E is `size` times as long as the error of `like`."""

    like: Any  # a BlockFormat
    size: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "quant", size=number(0))
        require(
            isinstance(self.like, BlockFormat) and self.block == "row",
            f"quant={self.name} imitates a format of blocks, and stores rows; leave quant.like and quant.block out",
        )

    def check_width(self, name: str, in_features: int) -> None:
        self.like.check_width(name, in_features)

    def pack(self, weight: Any, tensor_amax: float | None = None) -> dict[str, Any]:
        self.require_finite(weight)
        moved = (weight.float() + self.error(weight, tensor_amax)).to(weight.dtype)
        return super().encode(moved, self.scales(moved))

    def error(self, weight: Any, tensor_amax: float | None = None) -> Any:
        """E (N, K) of W (N, K), FP32."""
        import torch

        packed = self.like.pack(weight, tensor_amax)
        rounded = self.like.operand(packed, tuple(weight.shape), torch.float32) * self.like.output_scale(packed)
        lengths = (rounded - weight.float()).norm(dim=1, keepdim=True)  # (N, 1)
        bits = weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        seed = derive(self.name, hashlib.blake2b(bits, digest_size=16).hexdigest())
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)).to(weight.device)
        return drawn * (self.size * lengths / drawn.norm(dim=1, keepdim=True))

    def encode(self, weight: Any, scales: Any) -> dict[str, Any]:
        raise ConfigError(f"quant={self.name} has no codes to choose: it goes with quantizer=rtn alone")

    def foreign(self) -> None:  # type: ignore[override]
        """No program has a name for it."""
