"""What an algorithm is: advantages from rewards, and a loss from log-probabilities. Pure functions of tensors.

A loss is a sum over the sequences at hand divided by totals of the whole optimiser step, so the losses of micro-batches
add up to the loss of the step, whatever the split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Totals:
    """What one optimiser step holds in all its micro-batches."""

    sequences: int
    tokens: int  # completion tokens


class Algorithm(Protocol):
    """One file and one YAML for each algorithm."""

    @property
    def name(self) -> str: ...

    @property
    def on_policy(self) -> bool:
        """Whether a step samples from the policy (RL) or reads demonstrations (supervised)."""
        ...

    def advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        """Advantages (P, G) from the rewards (P, G) of P prompts with G completions each."""
        ...

    def loss(
        self,
        logprobs: torch.Tensor,  # (B, T) of the policy being trained, with gradient
        old_logprobs: torch.Tensor,  # (B, T) of the policy before this step's updates
        advantages: torch.Tensor,  # (B,)
        mask: torch.Tensor,  # (B, T) true on completion tokens
        totals: Totals,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """This micro-batch's share of the step's loss, and per-token indicator tensors (B, T) to be averaged as metrics."""
        ...
