"""The objective of a micro-batch: the loss of the algorithm, less the entropy bonus."""

from __future__ import annotations

import torch

from qerl_bench.algo.base import LossInputs
from qerl_bench.algo.loss import step_loss
from qerl_bench.train.spec import Specs


def objective(
    specs: Specs, inputs: LossInputs, loss_weights: torch.Tensor, entropy: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's part of the step's loss, and the columns of `step_loss`; `entropy` (B,T) in nats."""
    loss, columns = step_loss(specs.algo, specs.kl, inputs, loss_weights)
    if specs.train.entropy_coef > 0:
        loss = loss - specs.train.entropy_coef * (loss_weights[:, None] * entropy).sum()
    return loss, columns
