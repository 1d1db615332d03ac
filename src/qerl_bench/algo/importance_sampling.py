"""The sampler is not the trainer: how the difference is corrected for, and when a run speaks up about it.

Noise, kernels and rounding make the policy that sampled, mu, another one than the policy pi that the ratio of the loss
divides by, so the "on-policy" gradient is one from a neighbour's samples. Importance weights w = pi / mu of the sampled
tokens put that right on average, at the price of variance, which is why they are bounded:

- truncate: min(w, clip_max), truncated importance sampling (Ionides 2008; for this very gap Yao et al. 2025, "Your efficient
  RL framework secretly brings you off-policy RL training"; with parameter noise PSN-RLVR, arXiv 2602.02555). Biased,
  and no weight is larger than clip_max.
- mask: w where clip_min <= w <= clip_max, else 0 (IcePop, Ling team 2025; TRL 1.16's *_mask modes). What the trainer finds
  implausible, or far too plausible, teaches nothing.

A token's w is exp(log pi - log mu) of that token: low variance, but the shift in the states it was sampled from stays.
A sequence's w is exp of the sum over its tokens, which corrects for everything and varies a lot. Left out: the
geometric mean over the tokens of a sequence, which corrects for neither, and truncation from below.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.checks import require

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
SIZE = "mismatch/ess"
LARGEST = 80.0  # logarithm of the largest weight: exp of more is infinite in FP32


@dataclass(frozen=True, kw_only=True)
class ImportanceSampling:
    """What is measured of the gap between sampler and trainer, and what is done about it; see conf/run.yaml."""

    mode: str
    level: str
    clip_max: float
    clip_min: float | None
    warn_ess: float
    split_mismatch: bool

    def __post_init__(self) -> None:
        require(
            isinstance(self.split_mismatch, bool),
            f"importance_sampling.split_mismatch must be true or false, got {self.split_mismatch!r}",
        )
        for key, choices in (("mode", ("none", "truncate", "mask")), ("level", ("token", "sequence"))):
            value = getattr(self, key)
            require(value in choices, f"importance_sampling.{key} must be one of {', '.join(choices)}, got {value!r}")
        require(
            _is_number(self.clip_max) and 1 <= self.clip_max < float("inf"),
            f"importance_sampling.clip_max must be a number of at least 1, the weight where nothing differs, got {self.clip_max!r}",
        )
        require(
            self.clip_min is None or (_is_number(self.clip_min) and 0 < self.clip_min <= 1),
            f"importance_sampling.clip_min must be null or a number above 0 and at most 1, got {self.clip_min!r}",
        )
        require(
            self.clip_min is None or self.mode == "mask",
            f"importance_sampling.clip_min bounds the weights that are kept, and importance_sampling.mode={self.mode} drops none. Use "
            "importance_sampling.mode=mask, or importance_sampling.clip_min=null",
        )
        require(
            _is_number(self.warn_ess) and 0 <= self.warn_ess <= 1,
            f"importance_sampling.warn_ess must be a share from 0 (never) to 1, got {self.warn_ess!r}",
        )

    def raw(self, old: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """w at each token (B, T), unbounded, from log-probabilities of the ratio's old policy and of the sampler.

        With level=sequence all tokens of a completion have its weight. 1 off the mask.
        """
        import torch

        gap = torch.where(mask, old - sampler, 0.0)
        if self.level == "sequence":
            gap = torch.where(mask, gap.sum(1, keepdim=True), 0.0)
        return gap.clamp(max=LARGEST).exp()

    def bounded(self, raw: torch.Tensor) -> torch.Tensor:
        """What multiplies the loss of each token (B, T), from `raw` (B, T)."""
        import torch

        if self.mode == "truncate":
            return raw.clamp(max=self.clip_max)
        kept = (raw >= (self.clip_min or 0.0)) & (raw <= self.clip_max)
        return torch.where(kept, raw, 0.0)

    def watch(self, step: int, found: Mapping[str, float]) -> None:
        """Warn if the effective sample size of `step`, among its metrics `found`, is below `warn_ess`."""
        if found[SIZE] < self.warn_ess:
            log.warning(
                "step %d: %s is %.3f, below importance_sampling.warn_ess=%g: few of its tokens carry most of the weight",
                step,
                SIZE,
                found[SIZE],
                self.warn_ess,
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
