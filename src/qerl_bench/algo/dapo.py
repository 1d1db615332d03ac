"""algo=dapo: clip-higher, token-level mean, dynamic sampling and soft overlong penalty (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.algo.base import Terms, TokenLoss
from qerl_bench.algo.clip import require_advantage_eps, require_clip
from qerl_bench.errors import require

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Dapo:
    """Clipped surrogate, averaged over all completion tokens of the optimiser step: long answers weigh more."""

    name: str
    epsilon_low: float
    epsilon_high: float
    delta: float | None
    advantage_eps: float
    max_refills: int
    when_degenerate: str
    length_limit: int
    overlong_tokens: int
    overlong_factor: float

    on_policy = True

    def __post_init__(self) -> None:
        require_clip(self.epsilon_low, self.epsilon_high, self.delta)
        require_advantage_eps(self.advantage_eps)
        require(
            isinstance(self.max_refills, int) and self.max_refills >= 0,
            f"algo.max_refills must be a whole number of at least 0 (0 = no dynamic sampling), got {self.max_refills!r}",
        )
        require(
            self.when_degenerate in ("stop", "continue"),
            f"algo.when_degenerate must be stop or continue, got {self.when_degenerate!r}",
        )
        require(
            isinstance(self.overlong_tokens, int) and 0 <= self.overlong_tokens < self.length_limit,
            f"algo.overlong_tokens must be a whole number from 0 (no penalty) to below algo.length_limit="
            f"{self.length_limit}, got {self.overlong_tokens!r}",
        )
        require(self.overlong_factor >= 0, f"algo.overlong_factor must be at least 0, got {self.overlong_factor!r}")

    def advantages(self, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        from qerl_bench.algo.group import group_advantages

        if self.overlong_tokens > 0:
            rewards = rewards - self.overlong_factor * self.overlong(lengths).to(rewards.dtype)
        return group_advantages(rewards, self.advantage_eps)

    def overlong(self, lengths: torch.Tensor) -> torch.Tensor:
        """0 up to length_limit - overlong_tokens, then rising linearly to 1 at the limit (DAPO eq. 13, sign reversed)."""
        return ((lengths - self.length_limit + self.overlong_tokens) / self.overlong_tokens).clamp(0, 1)

    def weights(self, lengths: torch.Tensor) -> torch.Tensor:
        from qerl_bench.algo.group import token_mean_weights

        return token_mean_weights(lengths)

    def token_loss(self, terms: Terms) -> TokenLoss:
        from qerl_bench.algo.group import clipped_surrogate, token_ratio

        ratio = token_ratio(terms.logprobs, terms.old_logprobs, terms.mask)
        return clipped_surrogate(ratio, terms.advantages, terms.mask, self.epsilon_low, self.epsilon_high, self.delta)
