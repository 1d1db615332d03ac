"""The loss of a micro-batch, put together in one place.

weights x (importance x policy term + KL penalty), summed over tokens. As in TRL 1.16, the importance weights of
`algo/importance_sampling.py` do not touch the penalty.
"""

from __future__ import annotations

import torch

from qerl_bench.algo.base import Algorithm, LossInputs
from qerl_bench.algo.kl import KLPenalty


def objective(
    algo: Algorithm, kl: KLPenalty, terms: LossInputs, weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's share of the step's loss, and per-token columns (B, T) to be averaged as metrics.

    `weights` (B,) are these completions' entries of `algo.weights`, made from all completions of the step: the shares
    of micro-batches add up to the loss of the step, whatever the split.
    """
    found = algo.token_loss(terms)
    loss, columns = found.loss, found.indicators
    if terms.importance_weights is not None:
        loss = loss * terms.importance_weights
    if terms.reference_logprobs is not None:
        estimate = kl.estimate(terms.logprobs, terms.reference_logprobs, terms.mask)
        columns = {**columns, "kl": estimate}
        loss = loss + kl.coef * (estimate * found.ratio if kl.ratio_weighted else estimate)
    return (weights[:, None].to(loss.dtype) * loss).sum(), columns
