"""aqn=log: steep at first, then nearly flat.

QeRL's figures 9 and 15 show such a schedule and describe only its shape; the formula is our reconstruction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qerl_bench.aqn.decay import StagedDecay


@dataclass(frozen=True, kw_only=True)
class LogarithmicDecay(StagedDecay):
    """sigma_start - (sigma_start - sigma_end) * ln(1 + t n) / ln(1 + n), n = K - 2 or K - 1, t n the stages passed."""

    def at(self, t: float) -> float:
        passed = math.log1p(t * self.last) / math.log1p(self.last)
        return self.sigma_start - (self.sigma_start - self.sigma_end) * passed
