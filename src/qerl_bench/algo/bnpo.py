"""algo=bnpo: token mean within chunks of the step, then the mean over chunks; QeRL's scripts run it as "DAPO".

In TRL the chunk is whatever one micro-batch happens to hold, so memory settings change the objective. Here it is a
number of its own, and the micro-batches are free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.algo.base import LossInputs, TokenLoss
from qerl_bench.algo.clip import require_advantage_eps, require_clip
from qerl_bench.checks import require

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class BNPO:
    """Clipped surrogate, averaged over the tokens of each `chunk` consecutive completions, then over chunks."""

    name: str
    epsilon_low: float
    epsilon_high: float
    delta: float | None
    advantage_eps: float
    chunk: int

    on_policy = True
    max_resampling_rounds = 0
    on_no_signal = "continue"

    def __post_init__(self) -> None:
        require_clip(self.epsilon_low, self.epsilon_high, self.delta)
        require_advantage_eps(self.advantage_eps)
        require(
            isinstance(self.chunk, int) and self.chunk >= 1,
            f"algo.chunk must be a whole number of completions, at least 1, got {self.chunk!r}",
        )

    def advantages(self, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        from qerl_bench.algo.group import group_advantages

        return group_advantages(rewards, self.advantage_eps)

    def weights(self, lengths: torch.Tensor) -> torch.Tensor:
        import torch

        from qerl_bench.algo.group import token_mean_weights

        chunks = lengths.split(self.chunk)
        return torch.cat([token_mean_weights(chunk) for chunk in chunks]) / len(chunks)

    def token_loss(self, terms: LossInputs) -> TokenLoss:
        from qerl_bench.algo.group import clipped_surrogate, token_ratio

        ratio = token_ratio(terms.logprobs, terms.old_logprobs, terms.mask)
        return clipped_surrogate(ratio, terms.advantages, terms.mask, self.epsilon_low, self.epsilon_high, self.delta)
