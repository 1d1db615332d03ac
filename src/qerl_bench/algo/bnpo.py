"""algo=bnpo: token mean within chunks of the step, then the mean over chunks; QeRL's scripts run it as "DAPO".

In TRL a chunk is the content of one micro-batch, so memory settings change the loss. Here its size is an option, and
the size of micro-batches is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.algo.functional import constant, token_mean
from qerl_bench.algo.grpo import GRPO
from qerl_core.checks import check_fields, count

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class BNPO(GRPO):
    """GRPO averaged over the tokens of each `chunk` consecutive completions, then over chunks."""

    chunk: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "algo", chunk=count())

    def loss_weights(self, lengths: torch.Tensor) -> torch.Tensor:
        weights = constant(lengths, 0.0)
        chunks = lengths.split(self.chunk)
        for part, chunk in zip(weights.split(self.chunk), chunks, strict=True):
            part.copy_(token_mean(chunk))
        return weights / len(chunks)
