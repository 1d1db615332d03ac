"""Importance sampling: correct the loss for the gap between the policy that samples and the policy that trains.

Noise, kernels and rounding make the sampler mu differ from the trainer's old policy pi, by which the ratio of the loss
divides. The "on-policy" gradient is therefore estimated from samples of a neighboring policy. Importance weights
w = pi / mu of the sampled tokens remove this bias but add variance, so they are bounded:

- truncate: min(w, clip_max), truncated importance sampling (Ionides 2008; for this gap Yao et al. 2025, "Your efficient
  RL framework secretly brings you off-policy RL training"; with parameter noise PSN-RLVR, arXiv 2602.02555). Biased.
- mask: w if clip_min <= w <= clip_max, else 0 (IcePop, Ling team 2025; TRL 1.16's *_mask modes): tokens on which the
  two policies differ too much are left out of the loss.

level=token takes w = exp(log pi - log mu) of each token: low variance, but the states are still the sampler's.
level=sequence takes exp of the sum over the completion: no such bias, but high variance. Left out: the geometric mean
over the tokens of a sequence, which is neither unbiased nor per token, and truncation from below.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_core.checks import check_fields, flag, number, one_of, optional, require, share

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
ESS = "mismatch/ess"
MAX_LOG_WEIGHT = 80.0  # exp of more than about 88 is infinite in FP32


@dataclass(frozen=True, kw_only=True)
class ImportanceSampling:
    """How to measure the gap between sampler and trainer and how to correct it; conf/run.yaml explains each field."""

    mode: str
    level: str
    clip_max: float
    clip_min: float | None
    warn_ess: float
    split_mismatch: bool

    def __post_init__(self) -> None:
        check_fields(
            self,
            "importance_sampling",
            mode=one_of("none", "truncate", "mask"),
            level=one_of("token", "sequence"),
            clip_max=number(1),
            clip_min=optional(number(above=0, most=1)),
            warn_ess=share,
            split_mismatch=flag,
        )
        require(
            self.clip_min is None or self.mode == "mask",
            f"importance_sampling.clip_min is the smallest weight that mode=mask keeps, but importance_sampling.mode="
            f"{self.mode}. Use importance_sampling.mode=mask, or importance_sampling.clip_min=null",
        )

    def importance_weights(self, old: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Unbounded weights (B, T) from the log-probabilities (B, T) of old policy and sampler; 1 off the mask.

        With level=sequence every token of a completion has the weight of the completion.
        """
        gap = (old - sampler).where(mask, 0.0)
        if self.level == "sequence":
            gap = gap.sum(1, keepdim=True).where(mask, 0.0)
        return gap.clamp(max=MAX_LOG_WEIGHT).exp()

    def clip_or_mask(self, weights: torch.Tensor) -> torch.Tensor:
        """The weights (B, T) that multiply the loss, from unbounded `weights` (B, T)."""
        if self.mode == "truncate":
            return weights.clamp(max=self.clip_max)
        kept = (weights >= (self.clip_min or 0.0)) & (weights <= self.clip_max)
        return weights.where(kept, 0.0)

    def warn_if_low_ess(self, step: int, ess: float) -> None:
        """Warn if the effective sample size of `step`, a share of its tokens, is below `warn_ess`."""
        if ess < self.warn_ess:
            log.warning(
                "step %d: %s is %.3f, below importance_sampling.warn_ess=%g: a few tokens carry most of the weight",
                *(step, ESS, ess, self.warn_ess),
            )
