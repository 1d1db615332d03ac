"""aqn=exp: the exponential schedule of QeRL (eq. 8, Algorithm 1), the only shape with a published formula."""

from __future__ import annotations

from dataclasses import dataclass

from qerl_bench.aqn.decay import StagedDecay


@dataclass(frozen=True, kw_only=True)
class ExponentialDecay(StagedDecay):
    """sigma_start * (sigma_end / sigma_start) ** t: sigma falls by the same factor from stage to stage."""

    def at(self, t: float) -> float:
        return self.sigma_start * (self.sigma_end / self.sigma_start) ** t
