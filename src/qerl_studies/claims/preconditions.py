"""Whether a comparison could have shown its effect at all. A contrast that fails a gate is not testable here.

Gates are fixed with the claims, before the data. They look at the levels of the arms and at what the treatment acts on
directly, never at the effect that the claim is about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from qerl_studies.claims.estimate import Comparison, compare
from qerl_studies.claims.match import Contrast, Filter
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import LATE, Measure

LEVEL = 0.025  # of the one-sided test of a manipulation check
CEILING = 0.95  # accuracy above which arms cannot differ by much
LEARNED = 0.05  # accuracy that an arm must gain to have learned
LOST = 0.10  # accuracy that a diverged run has lost since its best
SMOOTHED = 10  # steps in a mean of accuracy

Gate = Callable[[Comparison, Sequence[Run]], str]  # why a comparison is not testable, empty if it is


@dataclass(frozen=True)
class ManipulationCheck:
    """The treatment raises what it acts on directly: each of `contrasts` is above zero in the primary setting."""

    measure: Measure
    contrasts: tuple[Contrast, ...]
    where: tuple[Filter, ...]

    def __call__(self, comparison: Comparison, runs: Sequence[Run]) -> str:
        for contrast in self.contrasts:
            checks = [
                one
                for one in compare(self.measure, contrast, self.where, runs)
                if one.is_in(self.where) and _same_setting(comparison, one)
            ]
            if not checks:
                return f"no runs show whether the treatment acts on {self.measure.name} ({contrast.label})"
            for one in checks:
                if one.effect is None:
                    return f"{contrast.label}, {self.measure.name}: {one.reason}"
                if not one.effect.whole.p_above(0.0) <= LEVEL:
                    effect = self.measure.estimate_text(one.effect.whole)
                    failed = "the treatment was not shown to act on its own target"
                    return f"{failed}: {contrast.label}, {self.measure.name} {effect}"
        return ""


def _same_setting(first: Comparison, second: Comparison) -> bool:
    """Whether two comparisons agree in all config items that both of them share between their arms."""
    mine, theirs = first.stratum.shared, second.stratum.shared
    return all(mine[key] == theirs[key] for key in mine.keys() & theirs.keys())


def learned(comparison: Comparison, runs: Sequence[Run]) -> str:
    """At most one arm stayed near its start, and at most one is all but perfect; two such arms could not differ."""
    arms = comparison.contrast.arms
    ends = [_start_and_end(list(arm.values())) for arm in comparison.stratum.arms]
    blank = [arm.label for arm, (start, end) in zip(arms, ends, strict=True) if math.isnan(end - start)]
    floor = [arm.label for arm, (start, end) in zip(arms, ends, strict=True) if end < start + LEARNED]
    ceiling = [arm.label for arm, (_, end) in zip(arms, ends, strict=True) if end > CEILING]
    if blank:
        return f"no accuracy was recorded for {' and '.join(blank)}"
    if len(floor) > 1:
        return (
            f"at the floor: accuracy of {' and '.join(floor)} ends less than {100 * LEARNED:.0f} points above its start"
        )
    if len(ceiling) > 1:
        return f"at the ceiling: accuracy of {' and '.join(ceiling)} ends above {100 * CEILING:.0f} %"
    return ""


def stable(comparison: Comparison, runs: Sequence[Run]) -> str:
    """In each arm, fewer than half of the runs diverged."""
    lost = diverged_arms(comparison)
    return f"diverged: {', '.join(lost)}" if lost else ""


GATES: dict[str, Gate] = {"learned": learned, "stable": stable}


def diverged_arms(comparison: Comparison) -> list[str]:
    """Arms in which half of the runs or more diverged, with the count."""
    arms = []
    for arm, runs in zip(comparison.contrast.arms, comparison.stratum.arms, strict=True):
        count = sum(map(diverged, runs.values()))
        arms += [f"{arm.label} in {count} of {len(runs)} runs"] if 2 * count >= len(runs) else []
    return arms


def diverged(run: Run) -> bool:
    """Whether the accuracy of rollouts, as a mean of ten steps, ends more than ten points below its best."""
    accuracy = run.series("train", "accuracy").dropna()
    if len(accuracy) < SMOOTHED:
        return False
    smooth = np.convolve(accuracy, np.ones(SMOOTHED) / SMOOTHED, mode="valid")
    return bool(smooth.max() - smooth[-1] > LOST)


def _start_and_end(runs: Sequence[Run]) -> tuple[float, float]:
    """Mean accuracy at the start and the end: of rollouts, or held-out accuracy if there were no rollouts."""
    pairs = []
    for run in runs:
        values = run.series("train", "accuracy").dropna()
        values = values if len(values) else run.series("eval", "eval/accuracy_sampled").dropna()
        few = max(1, min(SMOOTHED, math.floor(LATE * len(values))))
        pairs.append((values.iloc[:few].mean(), values.iloc[-few:].mean()))
    start, end = np.mean(pairs, axis=0).tolist()
    return start, end
