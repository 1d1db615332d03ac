"""aqn=matched, matched_linear, ...: decay from a noise that was measured for this base, so that all bases get one dose.

The same sigma does more to one base than to another. `qerl-bench gates` finds the sigma that raises a base's entropy by
the same share in each, and writes it into the command. It belongs to the base, as `model.seed` does: runs that differ
in it alone are runs of one setting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qerl_bench.aqn.base import Schedule
from qerl_bench.aqn.cosine import CosineDecay
from qerl_bench.aqn.decay import StagedDecay
from qerl_bench.aqn.exp import ExponentialDecay
from qerl_bench.aqn.linear import LinearDecay
from qerl_bench.aqn.log import LogarithmicDecay
from qerl_core.checks import MAX_SIGMA, check_fields, number


@dataclass(frozen=True, kw_only=True)
class Matched(Schedule):
    """As aqn=exp from `sigma_of_base` to `end_ratio` times it; a subclass has another shape in between."""

    shape: ClassVar[type[StagedDecay]] = ExponentialDecay

    name: str
    sigma_of_base: float
    end_ratio: float
    stages: int
    exponent: str
    boundaries: str

    def __post_init__(self) -> None:
        check_fields(self, "aqn", sigma_of_base=number(above=0, most=MAX_SIGMA), end_ratio=number(above=0, most=1))
        self._decay()  # which checks the rest

    def sigma(self, step: int, total_steps: int) -> float:
        return self._decay().sigma(step, total_steps)

    def _decay(self) -> StagedDecay:
        return self.shape(
            name=self.name,
            sigma_start=self.sigma_of_base,
            sigma_end=self.sigma_of_base * self.end_ratio,
            stages=self.stages,
            exponent=self.exponent,
            boundaries=self.boundaries,
        )


class MatchedLinear(Matched):
    shape = LinearDecay


class MatchedCosine(Matched):
    shape = CosineDecay


class MatchedLog(Matched):
    shape = LogarithmicDecay
