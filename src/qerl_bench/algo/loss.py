"""The loss of a micro-batch: loss weight x (importance weight x policy loss + KL penalty), summed over tokens.

As in TRL 1.16, the importance weights of `algo/importance_sampling.py` do not apply to the KL penalty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qerl_bench.algo.base import Algorithm, LossInputs
from qerl_bench.algo.kl import KLPenalty

if TYPE_CHECKING:
    import torch


def step_loss(
    algo: Algorithm, kl: KLPenalty, inputs: LossInputs, loss_weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's part of the step's loss, and columns (B, T) that are averaged over tokens as metrics.

    `loss_weights` (B,) are the entries of `algo.loss_weights` for these completions. They were computed from all
    completions of the step, so the parts add up to the step's loss however it is split.
    """
    token_loss = algo.token_loss(inputs)
    loss, columns = token_loss.loss, token_loss.indicators
    if inputs.importance_weights is not None:
        loss = loss * inputs.importance_weights
    if inputs.reference_logprobs is not None:
        estimate = kl.estimate(inputs.logprobs, inputs.reference_logprobs, inputs.mask)
        columns = {**columns, "kl": estimate}
        loss = loss + kl.coef * (estimate * token_loss.ratio if kl.ratio_weighted else estimate)
    return (loss_weights[:, None].to(loss.dtype) * loss).sum(), columns
