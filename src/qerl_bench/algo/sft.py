"""algo=sft: supervised fine-tuning, the warm start of model=tiny and the paper's comparison arm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.algo.base import LossInputs, TokenLoss

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class SFT:
    """Mean negative log-likelihood per completion token of the demonstrations."""

    name: str

    on_policy = False
    max_resampling_rounds = 0
    on_no_signal = "continue"

    def advantages(self, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        raise AssertionError("algo=sft reads demonstrations, which have no rewards")

    def weights(self, lengths: torch.Tensor) -> torch.Tensor:
        from qerl_bench.algo.group import token_mean_weights

        return token_mean_weights(lengths)

    def token_loss(self, terms: LossInputs) -> TokenLoss:
        import torch

        return TokenLoss(loss=-terms.logprobs * terms.mask, ratio=torch.ones_like(terms.logprobs), indicators={})
