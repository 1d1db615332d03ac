"""What the staged schedules share: K equal stages, a silent first stage, then K - 1 stages of falling sigma.

QeRL (arXiv 2510.11696) prints one formula, and its released code computes another. Of the four shapes in its figures,
three come without a formula. Two options choose between paper and code:

- `exponent` sets the progress t of stage k = 1..K-1. "K-2" (the code): t = (k - 1) / (K - 2), so the last stage has
  sigma_end. "K-1" (eq. 8 and Algorithm 1): t = (k - 1) / (K - 1), so the last stage stops short of sigma_end.
- `boundaries` sets the stage of a step. "even": all stages are equally long. "code": floor(step * K / total), at most
  K - 1, with steps counted from 1 as the code counts them. Every stage then begins one step early: the first stage is
  one step shorter and the last one step longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from qerl_bench.aqn.base import Schedule, stage_of
from qerl_core.checks import MAX_SIGMA, check_fields, count, number, one_of, positive, require


@dataclass(frozen=True, kw_only=True)
class StagedDecay(Schedule):
    """Stage 0 is silent; a subclass implements `at(t)`, which falls from sigma_start (t = 0) to sigma_end (t = 1)."""

    name: str
    sigma_start: float
    sigma_end: float
    stages: int
    exponent: str
    boundaries: str

    def __post_init__(self) -> None:
        check_fields(
            self,
            "aqn",
            sigma_start=number(above=0, most=MAX_SIGMA),
            sigma_end=positive,
            stages=count(2),
            exponent=one_of("K-2", "K-1"),
            boundaries=one_of("even", "code"),
        )
        require(
            self.sigma_end <= self.sigma_start,
            f"aqn needs sigma_end <= sigma_start, got sigma_start={self.sigma_start}, sigma_end={self.sigma_end}",
        )

    @property
    def divisor(self) -> int:
        """What stage numbers are divided by: K - 2 or K - 1, but at least 1."""
        return max(1, self.stages - (2 if self.exponent == "K-2" else 1))

    def stage(self, step: int, total_steps: int) -> int:
        """Index 0..K-1 of the stage of step `step`, counted 1..total_steps."""
        if self.boundaries == "even":
            return stage_of(step, total_steps, self.stages)
        return min(step * self.stages // total_steps, self.stages - 1)

    def at(self, t: float) -> float:
        """Sigma at progress t in [0, 1] through the stages with noise."""
        raise NotImplementedError

    def sigma(self, step: int, total_steps: int) -> float:
        stage = self.stage(step, total_steps)
        return 0.0 if stage == 0 else self.at((stage - 1) / self.divisor)
