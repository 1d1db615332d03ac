"""algo=grpo: group relative policy optimization (DeepSeekMath, arXiv 2402.03300; QeRL eq. 3-4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.algo.clipped import TwoSidedClippedAlgorithm
from qerl_bench.algo.functional import group_advantages, sequence_mean
from qerl_core.checks import check_fields, positive

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class GRPO(TwoSidedClippedAlgorithm):
    """Clipped surrogate, averaged over the tokens of each completion, then over completions."""

    advantage_eps: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "algo", advantage_eps=positive)

    def advantages(self, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return group_advantages(rewards, self.advantage_eps)

    def loss_weights(self, lengths: torch.Tensor) -> torch.Tensor:
        return sequence_mean(lengths)
