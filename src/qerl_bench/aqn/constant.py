"""aqn=constant: the same noise from the first step to the last; the control for every schedule."""

from __future__ import annotations

from dataclasses import dataclass

from qerl_bench.aqn.base import Schedule
from qerl_core.checks import MAX_SIGMA, check_fields, number


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """Sigma is `level` in every step, with no silent first stage."""

    name: str
    level: float

    def __post_init__(self) -> None:
        check_fields(self, "aqn", level=number(0, MAX_SIGMA))

    def sigma(self, step: int, total_steps: int) -> float:
        return float(self.level)
