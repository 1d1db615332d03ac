"""algo=dr_grpo: GRPO without its two biases (Dr. GRPO, arXiv 2503.20783)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.algo.clipped import TwoSidedClippedAlgorithm
from qerl_bench.algo.functional import centered, constant
from qerl_core.checks import check_fields, count

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class DrGRPO(TwoSidedClippedAlgorithm):
    """No division by the group's standard deviation, and a constant in place of each completion's length."""

    length_limit: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "algo", length_limit=count())

    def advantages(self, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return centered(rewards)

    def loss_weights(self, lengths: torch.Tensor) -> torch.Tensor:
        return constant(lengths, 1.0 / (len(lengths) * self.length_limit))
