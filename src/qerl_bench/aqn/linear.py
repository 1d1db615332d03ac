"""aqn=linear: sigma falls by the same amount from stage to stage.

QeRL's figures 9 and 15 show this shape without a formula; the formula here is our reconstruction.
"""

from __future__ import annotations

from dataclasses import dataclass

from qerl_bench.aqn.decay import StagedDecay


@dataclass(frozen=True, kw_only=True)
class LinearDecay(StagedDecay):
    """sigma_start + (sigma_end - sigma_start) * t."""

    def at(self, t: float) -> float:
        return self.sigma_start + (self.sigma_end - self.sigma_start) * t
