"""What the algorithms share: advantages within a group, probability ratios, the clipped surrogate, weights."""

from __future__ import annotations

import torch

from qerl_bench.algo.base import TokenLoss


def group_advantages(rewards: torch.Tensor, eps: float) -> torch.Tensor:
    """(R - mean) / (std + eps) within each row of `rewards` (P, G), std with Bessel's correction (DeepSeekMath, TRL).

    A group of equal rewards gets exactly 0: the rounding of its mean, divided by a std of that size, would be a
    gradient.
    """
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + eps)
    return advantages.masked_fill(degenerate(rewards)[:, None], 0.0)


def centred(rewards: torch.Tensor) -> torch.Tensor:
    """R - mean within each row of `rewards` (P, G); exactly 0 in a group of equal rewards."""
    return (rewards - rewards.mean(1, keepdim=True)).masked_fill(degenerate(rewards)[:, None], 0.0)


def degenerate(rewards: torch.Tensor) -> torch.Tensor:
    """Which rows of `rewards` (P, G) hold G equal numbers (P,): groups that teach nothing."""
    return rewards.amax(1) == rewards.amin(1)


def token_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """exp(new - old) for each token (B, T); 1 off the mask."""
    return torch.where(mask, logprobs - old_logprobs, 0.0).exp()


def sequence_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor, mean: bool) -> torch.Tensor:
    """exp of the sum (or mean) over the sequence of new - old, at each of its tokens (B, T); 1 off the mask."""
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0).sum(1)
    if mean:
        log_ratio = log_ratio / mask.sum(1).clamp(min=1)
    return torch.where(mask, log_ratio[:, None], 0.0).exp()


def clipped_surrogate(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None,
) -> TokenLoss:
    """-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) with r = `ratio` (B, T), 0 off the mask (PPO, arXiv 1707.06347).

    With `delta`, the first r is capped at it, which also bounds tokens of negative advantage (INTELLECT-2, arXiv
    2505.07291). The indicators say where clipping stops the gradient: r < 1 - eps_low with A < 0, and r > 1 + eps_high
    with A > 0.
    """
    advantage = advantages[:, None]
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    capped = ratio if delta is None else ratio.clamp(max=delta)
    indicators = {
        "clip_ratio/low_mean": (ratio < 1 - epsilon_low) & (advantage < 0) & mask,
        "clip_ratio/high_mean": (ratio > 1 + epsilon_high) & (advantage > 0) & mask,
    }
    loss = -torch.minimum(capped * advantage, clipped * advantage) * mask
    return TokenLoss(loss=loss, ratio=ratio, indicators=indicators)


def sequence_mean_weights(lengths: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens of each completion, then over completions: 1 / (N n_i), (N,)."""
    return 1.0 / (len(lengths) * lengths.clamp(min=1).double())


def token_mean_weights(lengths: torch.Tensor) -> torch.Tensor:
    """Mean over all tokens of the step: 1 / sum n_i, (N,)."""
    return torch.full(lengths.shape, 1.0 / max(1, int(lengths.sum())), dtype=torch.float64, device=lengths.device)
