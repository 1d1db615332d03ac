"""algo=grpo: group-relative policy optimisation (DeepSeekMath, arXiv 2402.03300; QeRL eq. 3-4) without KL penalty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.algo.base import Totals
from qerl_bench.errors import require

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Grpo:
    """Clipped surrogate, averaged over the tokens of each sequence, then over sequences."""

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
        per_sequence = per_token.sum(1) / mask.sum(1).clamp(min=1)
        return per_sequence.sum() / totals.sequences, indicators


def require_clip(epsilon_low: float, epsilon_high: float) -> None:
    """Raise BadInput unless both clip widths make sense."""
    require(0 < epsilon_low < 1, f"algo.epsilon_low must be between 0 and 1, got {epsilon_low!r}")
    require(0 < epsilon_high < float("inf"), f"algo.epsilon_high must be positive, got {epsilon_high!r}")


def require_advantage_eps(eps: float) -> None:
    """Raise BadInput unless `eps` keeps the division by a group's standard deviation finite."""
    require(eps > 0, f"algo.advantage_eps must be positive (it guards groups of nearly equal rewards), got {eps!r}")
