"""algo=cispo: clipped importance weights instead of a clipped surrogate (MiniMax-M1, arXiv 2506.13585).

Every token keeps its gradient; only the size of its weight is bounded. The bounds are written relative to 1, as in verl
and slime; TRL's absolute cap c is epsilon_high = c - 1 with epsilon_low = 1, which means no lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.algo.base import LossInputs, TokenLoss
from qerl_bench.algo.clip import require_advantage_eps
from qerl_bench.checks import require

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class CISPO:
    """-clip(r, 1 - epsilon_low, 1 + epsilon_high) A log p with a constant weight, averaged over the step's tokens."""

    name: str
    epsilon_low: float
    epsilon_high: float
    advantage_eps: float

    on_policy = True
    max_resampling_rounds = 0
    on_no_signal = "continue"

    def __post_init__(self) -> None:
        require(0 < self.epsilon_low <= 1, f"algo.epsilon_low must be in (0, 1], got {self.epsilon_low!r}")
        require(0 < self.epsilon_high < float("inf"), f"algo.epsilon_high must be positive, got {self.epsilon_high!r}")
        require_advantage_eps(self.advantage_eps)

    def advantages(self, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        from qerl_bench.algo.group import group_advantages

        return group_advantages(rewards, self.advantage_eps)

    def weights(self, lengths: torch.Tensor) -> torch.Tensor:
        from qerl_bench.algo.group import token_mean_weights

        return token_mean_weights(lengths)

    def token_loss(self, terms: LossInputs) -> TokenLoss:
        from qerl_bench.algo.group import token_ratio

        ratio = token_ratio(terms.logprobs, terms.old_logprobs, terms.mask)
        advantage = terms.advantages[:, None]
        weight = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high).detach()
        indicators = {
            "clip_ratio/low_mean": (ratio < 1 - self.epsilon_low) & (advantage < 0) & terms.mask,
            "clip_ratio/high_mean": (ratio > 1 + self.epsilon_high) & (advantage > 0) & terms.mask,
        }
        loss = -weight * advantage * terms.logprobs * terms.mask
        return TokenLoss(loss=loss, ratio=ratio, indicators=indicators)
