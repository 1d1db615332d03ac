"""Functions of tensors that algorithms share: advantages within a group, loss weights, ratios, the clipped surrogate.

They use methods of tensors only, so that composing a config does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qerl_bench.algo.base import LossInputs, TokenLoss

if TYPE_CHECKING:
    import torch


def group_advantages(rewards: torch.Tensor, eps: float) -> torch.Tensor:
    """(R - mean) / (std + eps) within each row of `rewards` (P, G), std with Bessel's correction (DeepSeekMath, TRL).

    Exactly 0 in a group of equal rewards. Without this rule, the rounding error of the mean, divided by a standard
    deviation of the same size, would give a gradient.
    """
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + eps)
    return advantages.masked_fill(_all_equal(rewards), 0.0)


def centered(rewards: torch.Tensor) -> torch.Tensor:
    """R - mean within each row of `rewards` (P, G); exactly 0 in a group of equal rewards."""
    return (rewards - rewards.mean(1, keepdim=True)).masked_fill(_all_equal(rewards), 0.0)


def _all_equal(rewards: torch.Tensor) -> torch.Tensor:
    return rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)


def constant(lengths: torch.Tensor, value: float) -> torch.Tensor:
    """The same loss weight for every completion, FP64 (N,)."""
    return lengths.double().new_full(lengths.shape, value)


def sequence_mean(lengths: torch.Tensor) -> torch.Tensor:
    """Loss weights of a mean over the tokens of each completion, then over completions: 1 / (N n_i), FP64 (N,)."""
    return 1.0 / (len(lengths) * lengths.clamp(min=1).double())


def token_mean(lengths: torch.Tensor) -> torch.Tensor:
    """Loss weights of a mean over all tokens: 1 / sum n_i, FP64 (N,)."""
    return constant(lengths, 1.0 / max(1, int(lengths.sum())))


def log_ratio(inputs: LossInputs) -> torch.Tensor:
    """log(new / old) of each token (B, T), 0 off the mask."""
    return (inputs.logprobs - inputs.old_logprobs).where(inputs.mask, 0.0)


def sequence_ratio(inputs: LossInputs, mean: bool) -> torch.Tensor:
    """exp of the sum (or mean) of `log_ratio` over each completion, at all of its tokens (B, T); 1 off the mask."""
    total = log_ratio(inputs).sum(1)
    if mean:
        total = total / inputs.mask.sum(1).clamp(min=1)
    return total[:, None].where(inputs.mask, 0.0).exp()


def clipped_surrogate(
    ratio: torch.Tensor, inputs: LossInputs, epsilon_low: float, epsilon_high: float, delta: float | None = None
) -> TokenLoss:
    """-min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A) with r = `ratio` (B, T) (PPO, arXiv 1707.06347).

    `delta` caps the first r, which bounds the loss of tokens with negative advantage (INTELLECT-2, arXiv 2505.07291).
    """
    advantage = inputs.advantages[:, None]
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    capped = ratio if delta is None else ratio.clamp(max=delta)
    loss = -(capped * advantage).minimum(clipped * advantage) * inputs.mask
    return TokenLoss(loss=loss, ratio=ratio, indicators=clip_indicators(ratio, inputs, epsilon_low, epsilon_high))


def clip_indicators(
    ratio: torch.Tensor, inputs: LossInputs, epsilon_low: float, epsilon_high: float
) -> dict[str, torch.Tensor]:
    """Tokens (B, T) that clipping affects: r < 1 - epsilon_low with A < 0, and r > 1 + epsilon_high with A > 0."""
    advantage = inputs.advantages[:, None]
    return {
        "clip_ratio/low_mean": (ratio < 1 - epsilon_low) & (advantage < 0) & inputs.mask,
        "clip_ratio/high_mean": (ratio > 1 + epsilon_high) & (advantage > 0) & inputs.mask,
    }
