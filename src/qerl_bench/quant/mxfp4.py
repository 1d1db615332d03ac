"""quant=mxfp4: 4.25 bits per weight, the OCP Microscaling format; tensors as in compressed-tensors' MXFP4A16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.checks import require
from qerl_bench.quant.base import require_blocks, require_finite

if TYPE_CHECKING:
    import torch

BLOCK = 32
SCALE_RULES = ("even", "floor", "rceil")


@dataclass(frozen=True, kw_only=True)
class MXFP4:
    """E2M1 codes and a power-of-two scale per 32 inputs. `scale_rule` says how a block's maximum picks the power."""

    name: str
    scale_rule: str

    def __post_init__(self) -> None:
        require(self.name != "", "quant.name is empty; give the format a name, for example mxfp4")
        require(
            self.scale_rule in SCALE_RULES,
            f"quant.scale_rule must be one of {', '.join(SCALE_RULES)}, got {self.scale_rule!r}; "
            "even is what compressed-tensors uses",
        )

    @property
    def bits_per_weight(self) -> float | None:
        return 4 + 8 / BLOCK

    def unsupported_reason(self, device: str) -> str | None:
        return None

    def check_width(self, name: str, in_features: int) -> None:
        require_blocks(name, in_features, BLOCK, "MXFP4")

    @property
    def block(self) -> int:
        return BLOCK

    @property
    def kernel_layout(self) -> str | None:
        return "mxfp4"

    def scales(
        self, weight: torch.Tensor, tensor_amax: float | None = None, stretch: float = 1.0
    ) -> dict[str, torch.Tensor]:
        from qerl_kernels import mxfp4

        require_finite(weight, "MXFP4")
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

    def pack(self, weight: torch.Tensor, tensor_amax: float | None = None) -> dict[str, torch.Tensor]:
        return self.encode(weight, self.scales(weight, tensor_amax))

    def operand(self, packed: dict[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        from qerl_kernels import mxfp4

        return mxfp4.operand(packed["weight_packed"], packed["weight_scale"], dtype)

    def output_scale(self, packed: dict[str, torch.Tensor]) -> float:
        return 1.0
