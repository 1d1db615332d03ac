"""algo=dapo: clip-higher, token-level mean, dynamic sampling and soft overlong penalty (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qerl_bench.algo.functional import token_mean
from qerl_bench.algo.grpo import GRPO
from qerl_core.checks import check_fields, count, number, one_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class DAPO(GRPO):
    """GRPO averaged over all completion tokens of the step, so that long completions weigh more."""

    max_resampling_rounds: int = field()  # without field() the constants of the base class would be defaults
    on_no_signal: str = field()
    length_limit: int
    overlong_share: float
    overlong_factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            "algo",
            max_resampling_rounds=count(0),
            on_no_signal=one_of("stop", "continue"),
            length_limit=count(),
            overlong_share=number(0, below=1),
            overlong_factor=number(0),
        )

    def advantages(self, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if self.overlong_share > 0:
            rewards = rewards - self.overlong_factor * self.overlong(lengths).to(rewards.dtype)
        return super().advantages(rewards, lengths)

    def overlong(self, lengths: torch.Tensor) -> torch.Tensor:
        """0 up to (1 - overlong_share) of the limit, then linearly up to 1 at the limit (DAPO eq. 13, negated)."""
        stretch = self.overlong_share * self.length_limit
        return ((lengths - self.length_limit + stretch) / stretch).clamp(0, 1)

    def loss_weights(self, lengths: torch.Tensor) -> torch.Tensor:
        return token_mean(lengths)
