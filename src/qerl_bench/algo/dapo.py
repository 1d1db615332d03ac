"""algo=dapo: clip-higher and token-level averaging (DAPO, arXiv 2503.14476), without dynamic sampling or length shaping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.algo.base import Totals
from qerl_bench.algo.grpo import require_advantage_eps, require_clip

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Dapo:
    """Clipped surrogate, averaged over all completion tokens of the optimiser step: long answers weigh more."""

    name: str
    epsilon_low: float
    epsilon_high: float
    advantage_eps: float

    on_policy = True

    def __post_init__(self) -> None:
        require_clip(self.epsilon_low, self.epsilon_high)
        require_advantage_eps(self.advantage_eps)

    def advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        from qerl_bench.algo.group import group_advantages

        return group_advantages(rewards, self.advantage_eps)

    def loss(
        self,
        logprobs: torch.Tensor,
        old_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        totals: Totals,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        from qerl_bench.algo.group import clipped_surrogate

        per_token, indicators = clipped_surrogate(
            logprobs, old_logprobs, advantages, mask, self.epsilon_low, self.epsilon_high
        )
        return per_token.sum() / totals.tokens, indicators
