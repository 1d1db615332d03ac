"""algo=rloo: REINFORCE with a leave-one-out baseline (arXiv 2402.14740), clipped after the first update as in TRL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.algo.base import LossInputs, TokenLoss
from qerl_bench.algo.clip import require_clip

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class RLOO:
    """A completion is one action: ratio of its probability, reward minus its siblings' mean; mean over completions."""

    name: str
    epsilon_low: float
    epsilon_high: float

    on_policy = True
    max_resampling_rounds = 0
    on_no_signal = "continue"

    def __post_init__(self) -> None:
        require_clip(self.epsilon_low, self.epsilon_high, None)

    def advantages(self, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """R - mean of the other G - 1 = (R - mean of all) G / (G - 1)."""
        from qerl_bench.algo.group import centred

        group = rewards.shape[1]
        return centred(rewards) * (group / (group - 1))

    def weights(self, lengths: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.full(lengths.shape, 1.0 / len(lengths), dtype=torch.float64, device=lengths.device)

    def token_loss(self, terms: LossInputs) -> TokenLoss:
        """The completion's loss in equal parts on its tokens, so that their sum is it."""
        from qerl_bench.algo.group import clipped_surrogate, sequence_ratio

        ratio = sequence_ratio(terms.logprobs, terms.old_logprobs, terms.mask, mean=False)
        found = clipped_surrogate(ratio, terms.advantages, terms.mask, self.epsilon_low, self.epsilon_high, None)
        share = found.loss / terms.mask.sum(1, keepdim=True).clamp(min=1)
        return TokenLoss(loss=share, ratio=ratio, indicators=found.indicators)
