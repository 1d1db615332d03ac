"""algo=dr_grpo: GRPO without its two biases (Dr. GRPO, arXiv 2503.20783)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.algo.base import LossInputs, TokenLoss
from qerl_bench.algo.clip import require_clip
from qerl_bench.checks import require

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class DrGRPO:
    """No division by the group's standard deviation, and one constant instead of each completion's length."""

    name: str
    epsilon_low: float
    epsilon_high: float
    delta: float | None
    length_limit: int

    on_policy = True
    max_resampling_rounds = 0
    on_no_signal = "continue"

    def __post_init__(self) -> None:
        require_clip(self.epsilon_low, self.epsilon_high, self.delta)
        require(
            isinstance(self.length_limit, int) and self.length_limit >= 1,
            f"algo.length_limit must be a whole number of tokens, at least 1, got {self.length_limit!r}",
        )

    def advantages(self, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        from qerl_bench.algo.group import centred

        return centred(rewards)

    def weights(self, lengths: torch.Tensor) -> torch.Tensor:
        import torch

        each = 1.0 / (len(lengths) * self.length_limit)
        return torch.full(lengths.shape, each, dtype=torch.float64, device=lengths.device)

    def token_loss(self, terms: LossInputs) -> TokenLoss:
        from qerl_bench.algo.group import clipped_surrogate, token_ratio

        ratio = token_ratio(terms.logprobs, terms.old_logprobs, terms.mask)
        return clipped_surrogate(ratio, terms.advantages, terms.mask, self.epsilon_low, self.epsilon_high, self.delta)
