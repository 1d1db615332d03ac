"""aqn=log: sigma falls steeply at first, then hardly at all.

QeRL's figures 9 and 15 show this shape without a formula; the formula here is our reconstruction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qerl_bench.aqn.decay import StagedDecay


@dataclass(frozen=True, kw_only=True)
class LogarithmicDecay(StagedDecay):
    """sigma_start - (sigma_start - sigma_end) * ln(1 + t n) / ln(1 + n) with n = `divisor`, K - 2 or K - 1."""

    def at(self, t: float) -> float:
        progress = math.log1p(t * self.divisor) / math.log1p(self.divisor)
        return self.sigma_start - (self.sigma_start - self.sigma_end) * progress
