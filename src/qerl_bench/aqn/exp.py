"""aqn=exp: the exponential schedule of QeRL, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass

from qerl_bench.aqn.base import stage_of
from qerl_bench.errors import require


@dataclass(frozen=True, kw_only=True)
class ExponentialDecay:
    """Stage 0 is silent; stage k = 1..K-1 has sigma_start * (sigma_end / sigma_start) ** ((k - 1) / (K - 2)).

    This is QeRL's eq. 8 with the exponent of its released code, which reaches sigma_end in the last stage; the printed
    equation divides by K - 1 and stops short of it.
    """

    name: str
    sigma_start: float
    sigma_end: float
    stages: int

    def __post_init__(self) -> None:
        require(
            0 < self.sigma_end <= self.sigma_start < float("inf"),
            f"aqn needs 0 < sigma_end <= sigma_start, both finite, got sigma_start={self.sigma_start}, "
            f"sigma_end={self.sigma_end}; for no noise use aqn=none",
        )
        require(
            isinstance(self.stages, int) and self.stages >= 2,
            f"aqn.stages must be at least 2 (one silent stage and one with noise), got {self.stages}",
        )

    def sigma(self, step: int, total_steps: int) -> float:
        stage = stage_of(step, total_steps, self.stages)
        if stage == 0:
            return 0.0
        progress = (stage - 1) / max(1, self.stages - 2)
        return self.sigma_start * (self.sigma_end / self.sigma_start) ** progress
