"""KL penalty of on-policy algorithms against the reference: the same model with its adapter switched off.

With x = log p - log p_ref at sampled tokens (Schulman, "Approximating KL divergence"):
k1 = x, k2 = x^2 / 2, k3 = exp(-x) + x - 1. k1 and k3 are unbiased estimates of KL(p || p_ref), but as a *loss* they
differ: the gradient of k1 is zero in expectation, that of k2 is right, and that of k3 is the gradient of KL(p_ref || p)
near p = p_ref (arXiv 2506.09477). Multiplied by the ratio new / old, k1 and k3 have the right gradient too (TRL 1.16's
use_bias_correction_kl), hence the option `ratio_weighted`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_core.checks import check_fields, count, flag, number, one_of, require

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class KLPenalty:
    """`coef` times the estimated KL divergence per token, added to each token's loss; 0 needs no reference.

    Whatever `coef`, the metric kl_to_base is measured in each step that `every` divides; 0: in none.
    """

    coef: float
    estimator: str
    ratio_weighted: bool
    every: int

    def __post_init__(self) -> None:
        check_fields(
            self, "kl", coef=number(0), estimator=one_of("k1", "k2", "k3"), ratio_weighted=flag, every=count(0)
        )
        require(
            self.coef == 0 or self.estimator != "k1" or self.ratio_weighted,
            "kl.estimator=k1 needs kl.ratio_weighted=true: without it the expected gradient of the penalty is zero. "
            "Use k2 or k3 for an unweighted penalty",
        )

    def measured_at(self, step: int) -> bool:
        """Whether kl_to_base is measured in `step`."""
        return self.every > 0 and step % self.every == 0

    def estimate(self, logprobs: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The estimate at each token (B, T) in nats, 0 off the mask."""
        x = (logprobs - reference).where(mask, 0.0)
        if self.estimator == "k1":
            return x
        return x.square() / 2 if self.estimator == "k2" else (-x).exp() + x - 1
