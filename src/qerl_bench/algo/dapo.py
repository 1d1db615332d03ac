"""algo=dapo: clip-higher, token-level mean, dynamic sampling and soft overlong penalty (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.algo.base import LossInputs, TokenLoss
from qerl_bench.algo.clip import require_advantage_eps, require_clip
from qerl_bench.checks import require

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class DAPO:
    """Clipped surrogate, averaged over all completion tokens of the optimiser step: long answers weigh more."""

    name: str
    epsilon_low: float
    epsilon_high: float
    delta: float | None
    advantage_eps: float
    max_resampling_rounds: int
    on_no_signal: str
    length_limit: int
    overlong_share: float
    overlong_factor: float

    on_policy = True

    def __post_init__(self) -> None:
        require_clip(self.epsilon_low, self.epsilon_high, self.delta)
        require_advantage_eps(self.advantage_eps)
        require(
            isinstance(self.max_resampling_rounds, int) and self.max_resampling_rounds >= 0,
            f"algo.max_resampling_rounds must be a whole number >= 0 (0 = no dynamic sampling), got {self.max_resampling_rounds!r}",
        )
        require(
            self.on_no_signal in ("stop", "continue"),
            f"algo.on_no_signal must be stop or continue, got {self.on_no_signal!r}",
        )
        require(
            isinstance(self.length_limit, int) and self.length_limit >= 1,
            f"algo.length_limit must be a whole number of tokens, at least 1, got {self.length_limit!r}",
        )
        require(
            0 <= self.overlong_share < 1,
            f"algo.overlong_share must be in [0, 1), 0 for no penalty, got {self.overlong_share!r}",
        )
        require(
            0 <= self.overlong_factor < float("inf"),
            f"algo.overlong_factor must be at least 0, got {self.overlong_factor!r}",
        )

    def advantages(self, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        from qerl_bench.algo.group import group_advantages

        if self.overlong_share > 0:
            rewards = rewards - self.overlong_factor * self.overlong(lengths).to(rewards.dtype)
        return group_advantages(rewards, self.advantage_eps)

    def overlong(self, lengths: torch.Tensor) -> torch.Tensor:
        """0 up to (1 - overlong_share) of the limit, then linearly up to 1 at the limit (DAPO eq. 13, negated)."""
        stretch = self.overlong_share * self.length_limit
        return ((lengths - self.length_limit + stretch) / stretch).clamp(0, 1)

    def weights(self, lengths: torch.Tensor) -> torch.Tensor:
        from qerl_bench.algo.group import token_mean_weights

        return token_mean_weights(lengths)

    def token_loss(self, terms: LossInputs) -> TokenLoss:
        from qerl_bench.algo.group import clipped_surrogate, token_ratio

        ratio = token_ratio(terms.logprobs, terms.old_logprobs, terms.mask)
        return clipped_surrogate(ratio, terms.advantages, terms.mask, self.epsilon_low, self.epsilon_high, self.delta)
