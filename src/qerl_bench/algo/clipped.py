"""Base classes of the algorithms with PPO's clipped surrogate. A subclass states how it differs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.algo.base import LossInputs, TokenLoss
from qerl_bench.algo.functional import clipped_surrogate, log_ratio, token_mean
from qerl_core.checks import check_fields, is_number, number, positive, require

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ClippedAlgorithm:
    """Clipped surrogate of the ratio of each token, averaged over all tokens of the step. Subclasses add advantages."""

    name: str
    epsilon_low: float
    epsilon_high: float

    on_policy = True
    right_only = False
    max_resampling_rounds = 0
    on_no_signal = "continue"

    def __post_init__(self) -> None:
        check_fields(self, "algo", epsilon_low=number(above=0, below=1), epsilon_high=positive)

    def loss_weights(self, lengths: torch.Tensor) -> torch.Tensor:
        return token_mean(lengths)

    def ratio(self, inputs: LossInputs) -> torch.Tensor:
        return log_ratio(inputs).exp()

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        return clipped_surrogate(self.ratio(inputs), inputs, self.epsilon_low, self.epsilon_high)


@dataclass(frozen=True, kw_only=True)
class TwoSidedClippedAlgorithm(ClippedAlgorithm):
    """The same with `delta`, a cap on the ratio of tokens with negative advantage; None for no cap."""

    delta: float | None

    def __post_init__(self) -> None:
        super().__post_init__()
        least = 1 + self.epsilon_high
        require(
            self.delta is None or (is_number(self.delta) and self.delta > least),
            f"algo.delta caps the ratio above the clip range: it must be a number above 1 + algo.epsilon_high = "
            f"{least:g}, got {self.delta!r}; for no cap use algo.delta=null",
        )

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        return clipped_surrogate(self.ratio(inputs), inputs, self.epsilon_low, self.epsilon_high, self.delta)
