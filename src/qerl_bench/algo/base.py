"""What an algorithm is: advantages from rewards, weights from lengths, a loss for every token; pure functions.

The loss of an optimiser step is  sum_i w_i sum_t l_it  over its completions i and their tokens t
(`algo/loss.py`). The weights w_i are made once from the lengths of all completions of the step, so neither the
split into micro-batches nor leaving out completions whose l_it is zero can change the loss or its gradient. KL
penalty and reference belong to `algo/kl.py`, for all algorithms alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What a loss may look at: right-padded completions side by side."""

    logprobs: torch.Tensor  # (B, T) of the policy being trained, with gradient
    old_logprobs: torch.Tensor  # (B, T) of the policy before the first update on this batch
    advantages: torch.Tensor  # (B,)
    mask: torch.Tensor  # (B, T) true on completion tokens
    reference_logprobs: torch.Tensor | None = None  # (B, T) of the base without its adapter, for a KL penalty
    importance_weights: torch.Tensor | None = None  # (B, T) old over sampler probability, bounded


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """A loss for every token, 0 off the mask, before weights."""

    loss: torch.Tensor  # (B, T)
    ratio: torch.Tensor  # (B, T) new over old probability as the algorithm takes it, with gradient; 1 off the mask
    indicators: dict[str, torch.Tensor]  # (B, T) each, true where it holds; logged as shares of tokens


class Algorithm(Protocol):
    """One file and one YAML for each algorithm."""

    @property
    def name(self) -> str: ...

    @property
    def on_policy(self) -> bool:
        """Whether a step samples from the policy (RL) or reads demonstrations (supervised)."""
        ...

    @property
    def max_resampling_rounds(self) -> int:
        """How often a step may sample again to replace groups without signal; 0: never, all are kept."""
        ...

    @property
    def on_no_signal(self) -> str:
        """What to do if no group of a step has signal after all refills: "stop" | "continue"."""
        ...

    def advantages(self, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Advantages (P, G) from rewards (P, G) of P prompts with G completions of `lengths` (P, G) tokens."""
        ...

    def weights(self, lengths: torch.Tensor) -> torch.Tensor:
        """What each token of a completion counts in the step's loss (N,), from the lengths (N,) of all completions."""
        ...

    def token_loss(self, terms: LossInputs) -> TokenLoss:
        """The loss of every token, before weights."""
        ...
