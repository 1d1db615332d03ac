"""aqn=constant: the same noise from the first step to the last; the control for every schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qerl_bench.aqn.base import Schedule
from qerl_bench.checks import require


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """No stages, and no silent beginning."""

    name: str
    level: float

    def __post_init__(self) -> None:
        ok = isinstance(self.level, int | float) and not isinstance(self.level, bool)
        require(
            ok and math.isfinite(self.level) and self.level >= 0, f"aqn.level must be a number >= 0, got {self.level!r}"
        )

    def sigma(self, step: int, total_steps: int) -> float:
        return float(self.level)
