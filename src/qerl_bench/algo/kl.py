"""The KL penalty of every on-policy algorithm: against the same model with its adapter switched off.

With x = log p - log p_ref at sampled tokens (Schulman, "Approximating KL divergence"):
k1 = x, k2 = x^2 / 2, k3 = exp(-x) + x - 1. All but k2 estimate KL(p || p_ref) without bias; as a *loss* they differ.
The gradient of k1 alone is zero in expectation, that of k2 is right, that of k3 alone is the one of KL(p_ref || p) near
p = p_ref (arXiv 2506.09477). Multiplied by the ratio new / old, k1 and k3 get the right gradient too (TRL 1.16's
use_bias_correction_kl), which is why `ratio_weighted` exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.checks import require

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class KLPenalty:
    """`coef` times the estimated KL divergence per token, added to each token's loss; 0 = no reference needed."""

    coef: float
    estimator: str
    ratio_weighted: bool

    def __post_init__(self) -> None:
        number = isinstance(self.coef, int | float) and not isinstance(self.coef, bool)
        require(number and 0 <= self.coef < float("inf"), f"kl.coef must be a number of at least 0, got {self.coef!r}")
        require(self.estimator in ("k1", "k2", "k3"), f"kl.estimator must be k1, k2 or k3, got {self.estimator!r}")
        require(
            isinstance(self.ratio_weighted, bool),
            f"kl.ratio_weighted must be true or false, got {self.ratio_weighted!r}",
        )
        require(
            self.coef == 0 or self.estimator != "k1" or self.ratio_weighted,
            "kl.estimator=k1 needs kl.ratio_weighted=true: without it the expected gradient of the penalty is zero. "
            "Use k2 or k3 for an unweighted penalty",
        )

    def estimate(self, logprobs: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The estimate at each token (B, T) in nats, 0 off the mask."""
        import torch

        x = torch.where(mask, logprobs - reference, 0.0)
        return {"k1": lambda: x, "k2": lambda: x.square() / 2, "k3": lambda: torch.exp(-x) + x - 1}[self.estimator]()
