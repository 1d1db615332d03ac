"""aqn=cosine: sigma falls slowly, then fast, then slowly again.

QeRL's figures 9 and 15 show this shape without a formula; the formula here is our reconstruction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qerl_bench.aqn.decay import StagedDecay


@dataclass(frozen=True, kw_only=True)
class CosineDecay(StagedDecay):
    """sigma_end + (sigma_start - sigma_end) * (1 + cos(pi t)) / 2."""

    def at(self, t: float) -> float:
        return self.sigma_end + 0.5 * (self.sigma_start - self.sigma_end) * (1 + math.cos(math.pi * t))
