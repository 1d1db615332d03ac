"""The interface of an algorithm: advantages from rewards, loss weights from lengths, a loss for every token.

The loss of an optimizer step is  sum_i w_i sum_t l_it  over completions i and their tokens t (`algo/loss.py`). The
loss weights w_i come from the lengths of all completions of the step. So neither the split into micro-batches nor
skipping completions with zero l_it changes the loss or its gradient. The KL penalty (`algo/kl.py`) is the same for all
algorithms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What a loss is computed from: B right-padded completions of up to T tokens."""

    logprobs: torch.Tensor  # (B, T) of the policy being trained, with gradient
    old_logprobs: torch.Tensor  # (B, T) of the policy before the first update on this batch
    advantages: torch.Tensor  # (B,)
    mask: torch.Tensor  # (B, T) true on completion tokens
    reference_logprobs: torch.Tensor | None = None  # (B, T) of the base without its adapter, for a KL penalty
    importance_weights: torch.Tensor | None = None  # (B, T) old over sampler probability, bounded


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """The loss of every token before loss weights, 0 off the mask."""

    loss: torch.Tensor  # (B, T)
    ratio: torch.Tensor  # (B, T) new over old probability as the algorithm defines it, with gradient; 1 off the mask
    indicators: dict[str, torch.Tensor]  # (B, T) booleans, logged as fractions of tokens


class Algorithm(Protocol):
    """One file and one YAML for each algorithm."""

    @property
    def name(self) -> str: ...

    @property
    def on_policy(self) -> bool:
        """Whether a step samples from the policy (RL) or reads demonstrations (supervised)."""
        ...

    @property
    def right_only(self) -> bool:
        """Whether demonstrations that the task's grader calls wrong are left out; False if none are read."""
        ...

    @property
    def max_resampling_rounds(self) -> int:
        """How often a step may sample again to replace groups without signal; 0: never, all are kept."""
        ...

    @property
    def on_no_signal(self) -> str:
        """What to do if no group of a step has signal after all resampling rounds: "stop" | "continue"."""
        ...

    def advantages(self, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Advantages (P, G) from rewards (P, G) of P prompts with G completions of `lengths` (P, G) tokens."""
        ...

    def loss_weights(self, lengths: torch.Tensor) -> torch.Tensor:
        """How much each token of a completion counts in the step's loss: FP64 (N,), from all N lengths (N,)."""
        ...

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        """The loss of every token before loss weights."""
        ...
