"""algo=sft: supervised fine-tuning on demonstrations, for the warm start of model=tiny and the paper's SFT arm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.algo.base import LossInputs, TokenLoss
from qerl_bench.algo.functional import token_mean
from qerl_core.checks import check_fields, flag

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class SFT:
    """Mean negative log-likelihood per completion token of the demonstrations; with `right_only`, of the right ones."""

    name: str
    right_only: bool

    on_policy = False
    max_resampling_rounds = 0
    on_no_signal = "continue"

    def __post_init__(self) -> None:
        check_fields(self, "algo", right_only=flag)

    def advantages(self, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        raise AssertionError("algo=sft reads demonstrations, which have no rewards")

    def loss_weights(self, lengths: torch.Tensor) -> torch.Tensor:
        return token_mean(lengths)

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        ones = inputs.logprobs.new_ones(inputs.logprobs.shape)
        return TokenLoss(loss=-inputs.logprobs * inputs.mask, ratio=ones, indicators={})
