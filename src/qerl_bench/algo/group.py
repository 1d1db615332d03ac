"""What GRPO and its relatives share: advantages within a group, and the clipped surrogate of PPO."""

from __future__ import annotations

import torch


def group_advantages(rewards: torch.Tensor, eps: float) -> torch.Tensor:
    """(R - mean) / (std + eps) within each row of `rewards` (P, G), std with Bessel's correction (DeepSeekMath, TRL).

    A group of equal rewards gets exactly 0: the rounding of its mean, divided by a std of that size, would be a gradient.
    """
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + eps)
    equal = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    return advantages.masked_fill(equal, 0.0)


def clipped_surrogate(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Per-token loss -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) with r = exp(logprobs - old), (B, T), 0 off the mask.

    The indicators say where clipping stops the gradient: r < 1 - eps_low with A < 0, and r > 1 + eps_high with A > 0.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    advantage = advantages[:, None]
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage) * mask
    indicators = {
        "clip_ratio/low_mean": (ratio < 1 - epsilon_low) & (advantage < 0) & mask,
        "clip_ratio/high_mean": (ratio > 1 + epsilon_high) & (advantage > 0) & mask,
    }
    return loss, indicators
