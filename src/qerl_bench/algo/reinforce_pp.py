"""algo=reinforce_pp: REINFORCE++ (arXiv 2501.03262): rewards whitened over the whole batch instead of within groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.algo.base import LossInputs, TokenLoss
from qerl_bench.algo.clip import require_advantage_eps, require_clip
from qerl_bench.checks import require

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus:
    """Clipped surrogate with the advantage (R - mean) / (std + eps) over the step's tokens, averaged over tokens."""

    name: str
    epsilon_low: float
    epsilon_high: float
    advantage_eps: float
    group_baseline: bool

    on_policy = True
    max_resampling_rounds = 0
    on_no_signal = "continue"

    def __post_init__(self) -> None:
        require_clip(self.epsilon_low, self.epsilon_high, None)
        require_advantage_eps(self.advantage_eps)
        require(
            isinstance(self.group_baseline, bool),
            f"algo.group_baseline must be true or false, got {self.group_baseline!r}",
        )

    def advantages(self, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Every token carries its completion's reward, so a long completion counts more in mean and std (Bessel)."""
        from qerl_bench.algo.group import centred

        if self.group_baseline:
            rewards = centred(rewards)
        if bool((rewards == rewards.flatten()[0]).all()):
            return rewards.new_zeros(rewards.shape)
        tokens = lengths.sum()
        mean = (rewards * lengths).sum() / tokens
        variance = ((rewards - mean).square() * lengths).sum() / (tokens - 1)
        return (rewards - mean) / (variance.sqrt() + self.advantage_eps)

    def weights(self, lengths: torch.Tensor) -> torch.Tensor:
        from qerl_bench.algo.group import token_mean_weights

        return token_mean_weights(lengths)

    def token_loss(self, terms: LossInputs) -> TokenLoss:
        from qerl_bench.algo.group import clipped_surrogate, token_ratio

        ratio = token_ratio(terms.logprobs, terms.old_logprobs, terms.mask)
        return clipped_surrogate(ratio, terms.advantages, terms.mask, self.epsilon_low, self.epsilon_high, None)
