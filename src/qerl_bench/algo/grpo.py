"""algo=grpo: group-relative policy optimisation (DeepSeekMath, arXiv 2402.03300; QeRL eq. 3-4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.algo.base import LossInputs, TokenLoss
from qerl_bench.algo.clip import require_advantage_eps, require_clip

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """Clipped surrogate, averaged over the tokens of each completion, then over completions."""

    name: str
    epsilon_low: float
    epsilon_high: float
    delta: float | None
    advantage_eps: float

    on_policy = True
    max_resampling_rounds = 0
    on_no_signal = "continue"

    def __post_init__(self) -> None:
        require_clip(self.epsilon_low, self.epsilon_high, self.delta)
        require_advantage_eps(self.advantage_eps)

    def advantages(self, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        from qerl_bench.algo.group import group_advantages

        return group_advantages(rewards, self.advantage_eps)

    def weights(self, lengths: torch.Tensor) -> torch.Tensor:
        from qerl_bench.algo.group import sequence_mean_weights

        return sequence_mean_weights(lengths)

    def token_loss(self, terms: LossInputs) -> TokenLoss:
        from qerl_bench.algo.group import clipped_surrogate, token_ratio

        ratio = token_ratio(terms.logprobs, terms.old_logprobs, terms.mask)
        return clipped_surrogate(ratio, terms.advantages, terms.mask, self.epsilon_low, self.epsilon_high, self.delta)
