"""algo=cispo: clipped importance weights instead of a clipped surrogate (MiniMax-M1, arXiv 2506.13585).

Every token keeps its gradient; only its weight is bounded. The bounds are relative to 1, as in verl and slime; TRL's
absolute cap c is epsilon_high = c - 1 with epsilon_low = 1, which means no lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.algo.base import LossInputs, TokenLoss
from qerl_bench.algo.clipped import ClippedAlgorithm
from qerl_bench.algo.functional import clip_indicators, group_advantages
from qerl_core.checks import check_fields, number, positive

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class CISPO(ClippedAlgorithm):
    """-clip(r, 1 - epsilon_low, 1 + epsilon_high) A log p with a constant weight, averaged over the step's tokens."""

    advantage_eps: float

    def __post_init__(self) -> None:
        check_fields(self, "algo", epsilon_low=number(above=0, most=1), epsilon_high=positive, advantage_eps=positive)

    def advantages(self, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return group_advantages(rewards, self.advantage_eps)

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        ratio = self.ratio(inputs)
        weight = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high).detach()
        loss = -weight * inputs.advantages[:, None] * inputs.logprobs * inputs.mask
        indicators = clip_indicators(ratio, inputs, self.epsilon_low, self.epsilon_high)
        return TokenLoss(loss=loss, ratio=ratio, indicators=indicators)
