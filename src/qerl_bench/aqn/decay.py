"""What the staged schedules share: K equal stages, the first one silent, then K - 1 falling values.

QeRL (arXiv 2510.11696) prints one formula, its released code computes another, and of three of the four shapes in its
figures neither has one. The differences are switches here:

- `exponent`: how far stage k = 1..K-1 has come. "K-2" is t = (k - 1) / (K - 2), as in the code: the last stage has
  sigma_end. "K-1" is t = (k - 1) / (K - 1), as in eq. 8 and Algorithm 1: the last stage stops short of sigma_end.
- `boundaries`: which stage a step belongs to. "even" gives every stage the same share of the run. "code" is
  floor(step * K / total), capped at K - 1, with steps counted from 1 as the code counts them: every stage begins one
  step early, and the last one is longer by the step that the first one lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from qerl_bench.aqn.base import Schedule, stage_of
from qerl_bench.checks import require


@dataclass(frozen=True, kw_only=True)
class StagedDecay(Schedule):
    """Stage 0 is silent; a subclass says by `at(t)` how sigma falls from sigma_start (t = 0) to sigma_end (t = 1)."""

    name: str
    sigma_start: float
    sigma_end: float
    stages: int
    exponent: str
    boundaries: str

    def __post_init__(self) -> None:
        require(
            0 < self.sigma_end <= self.sigma_start < float("inf"),
            f"aqn needs 0 < sigma_end <= sigma_start, both finite, got sigma_start={self.sigma_start}, "
            f"sigma_end={self.sigma_end}; for no noise use aqn=none",
        )
        require(
            isinstance(self.stages, int) and self.stages >= 2,
            f"aqn.stages must be a whole number of at least 2 (a silent stage and one with noise), got {self.stages!r};"
            " for no noise use aqn=none, for the same noise in every step aqn=constant",
        )
        require(self.exponent in ("K-2", "K-1"), f"aqn.exponent must be K-2 or K-1, got {self.exponent!r}")
        require(self.boundaries in ("even", "code"), f"aqn.boundaries must be even or code, got {self.boundaries!r}")

    @property
    def last(self) -> int:
        """The count that stage numbers are divided by: K - 2 or K - 1, and 1 where that would be 0."""
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
        return 0.0 if stage == 0 else self.at((stage - 1) / self.last)
