"""quant=random-error: each row of a weight moved as far as a format would move it, but in a random direction.

It has the size of that format's error without its structure: the error knows neither blocks nor grid, and leaves no
dead zone. The direction is drawn from a seed of the weight itself, so a copy of a model has one error, on every device.
What comes out is stored in INT8, whose fused kernels a run needs to be as fast as with the format imitated; this adds
an error of its own, which is small beside a 4-bit one. Left out: other quantizers than rtn, which would round the
weight and never move it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.quant.base import BlockFormat, WeightFormat
from qerl_bench.quant.symmetric import INT8
from qerl_core.checks import ConfigError, check_fields, number, require
from qerl_core.seeding import derive

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class RandomError(INT8):
    """W + E: in each row E is `size` times as long as the error of `like`."""

    like: WeightFormat
    size: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "quant", size=number(0))
        require(
            isinstance(self.like, BlockFormat) and self.block == "row",
            f"quant={self.name} imitates a format of blocks and stores rows, got quant.like={self.like.name} and "
            f"quant.block={self.block}; use quant@quant.like=nvfp4 and quant.block=row",
        )

    def check_width(self, name: str, in_features: int) -> None:
        self.like.check_width(name, in_features)

    def pack(self, weight: torch.Tensor, tensor_amax: float | None = None) -> dict[str, torch.Tensor]:
        self.require_finite(weight)
        moved = (weight.float() + self.error(weight, tensor_amax)).to(weight.dtype)
        return super().encode(moved, self.scales(moved))

    def error(self, weight: torch.Tensor, tensor_amax: float | None = None) -> torch.Tensor:
        """E (N, K) of W (N, K), FP32."""
        import torch

        assert isinstance(self.like, BlockFormat)
        packed = self.like.pack(weight, tensor_amax)
        rounded = self.like.operand(packed, (len(weight), weight.shape[1]), torch.float32)
        lengths = (rounded * self.like.output_scale(packed) - weight.float()).norm(dim=1, keepdim=True)  # (N, 1)
        bits = weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        seed = derive(self.name, hashlib.blake2b(bits, digest_size=16).hexdigest())
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)).to(weight.device)
        return drawn * (self.size * lengths / drawn.norm(dim=1, keepdim=True))

    def encode(self, weight: torch.Tensor, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        raise ConfigError(f"quant={self.name} chooses no codes, so it has no other quantizer than rtn")

    def foreign(self) -> None:  # type: ignore[override]
        """No program has a name for it."""
