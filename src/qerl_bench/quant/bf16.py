"""The unquantized baseline: linear layers stay exactly as the checkpoint loaded them, and nothing is rounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.checks import require

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class BF16:
    """The format of a model that is not quantized. Its layers are never packed; most methods go unused."""

    name: str

    def __post_init__(self) -> None:
        require(self.name != "", "quant.name is empty; give the format a name, for example bf16")

    @property
    def bits_per_weight(self) -> float | None:
        return None

    def unsupported_reason(self, device: str) -> str | None:
        return None

    def check_width(self, name: str, in_features: int) -> None:
        """Any width will do."""

    @property
    def block(self) -> int:
        return 0

    @property
    def kernel_layout(self) -> str | None:
        return None

    def scales(
        self, weight: torch.Tensor, tensor_amax: float | None = None, stretch: float = 1.0
    ) -> dict[str, torch.Tensor]:
        return {}

    def unit(self, scales: dict[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
        import torch

        return torch.ones(shape)

    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def encode(self, weight: torch.Tensor, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"weight": weight}

    def pack(self, weight: torch.Tensor, tensor_amax: float | None = None) -> dict[str, torch.Tensor]:
        return {"weight": weight}

    def operand(self, packed: dict[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return packed["weight"].to(dtype)

    def output_scale(self, packed: dict[str, torch.Tensor]) -> float:
        return 1.0
