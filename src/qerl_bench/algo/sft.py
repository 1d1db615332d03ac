"""algo=sft: supervised fine-tuning, the warm start of model=tiny and the paper's comparison arm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.algo.base import Totals

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Sft:
    """Mean negative log-likelihood per completion token of the demonstrations."""

    name: str

    on_policy = False

    def advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        raise AssertionError("algo=sft reads demonstrations, which have no rewards")

    def loss(
        self,
        logprobs: torch.Tensor,
        old_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        totals: Totals,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -(logprobs * mask).sum() / totals.tokens, {}
