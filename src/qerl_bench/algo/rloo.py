"""algo=rloo: REINFORCE with a leave-one-out baseline (arXiv 2402.14740), clipped after the first update as in TRL."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qerl_bench.algo.base import LossInputs, TokenLoss
from qerl_bench.algo.clipped import ClippedAlgorithm
from qerl_bench.algo.functional import centered, constant, sequence_ratio

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class RLOO(ClippedAlgorithm):
    """A completion is one action: the ratio is that of its probability, the loss a mean over completions."""

    def advantages(self, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """R - mean of the other G - 1 = (R - mean of all) G / (G - 1)."""
        group_size = rewards.shape[1]
        return centered(rewards) * (group_size / (group_size - 1))

    def loss_weights(self, lengths: torch.Tensor) -> torch.Tensor:
        return constant(lengths, 1.0 / len(lengths))

    def ratio(self, inputs: LossInputs) -> torch.Tensor:
        return sequence_ratio(inputs, mean=False)

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        """Each token has an equal share of its completion's loss."""
        whole = super().token_loss(inputs)
        return replace(whole, loss=whole.loss / inputs.mask.sum(1, keepdim=True).clamp(min=1))
