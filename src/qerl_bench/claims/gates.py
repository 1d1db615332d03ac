"""Whether a comparison could have shown its effect at all. A contrast that fails a gate is not testable here.

Gates are fixed before the data, with the claims, and look at the arms' levels and at the treatment's own target, never
at the effect that is asked about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from qerl_bench.claims.estimate import Setting, holds, settings
from qerl_bench.claims.match import Contrast, Where
from qerl_bench.claims.measure import LATE, Measure
from qerl_bench.study.load import Run

LEVEL = 0.025  # of the one-sided test that a treatment acts on its own target
CEILING = 0.95  # share of right answers above which arms cannot differ by much
LEARNED = 0.05  # share of right answers by which an arm has to rise above its own start
LOST = 0.10  # share of right answers by which a run that diverged ends below its own best
SMOOTHED = 10  # steps in a mean of accuracy

Gate = Callable[[Setting, Sequence[Run]], str]  # why a setting is not testable, empty if it is


@dataclass(frozen=True)
class Acts:
    """The treatment moves its own target upwards: each of `contrasts` is above zero in the primary setting."""

    measure: Measure
    contrasts: tuple[Contrast, ...]
    where: tuple[Where, ...]

    def __call__(self, setting: Setting, runs: Sequence[Run]) -> str:
        for contrast in self.contrasts:
            found = [
                one
                for one in settings(self.measure, contrast, self.where, runs)
                if all(holds(condition, one.stratum) for condition in self.where) and _alike(setting, one)
            ]
            if not found:
                return f"no runs show whether the treatment acts on {self.measure.name} ({contrast.label})"
            for one in found:
                if one.effect is None:
                    return f"{contrast.label}, {self.measure.name}: {one.reason}"
                if not one.effect.whole.p_above(0.0) <= LEVEL:
                    seen = self.measure.describe(one.effect.whole)
                    shown = "the treatment was not shown to act on its own target"
                    return f"{shown}: {contrast.label}, {self.measure.name} {seen}"
        return ""


def _alike(setting: Setting, other: Setting) -> bool:
    """Whether two settings agree in whatever their own arms share in both."""
    mine, theirs = setting.stratum.facts, other.stratum.facts
    return all(mine[key] == theirs[key] for key in mine.keys() & theirs.keys())


def learned(setting: Setting, runs: Sequence[Run]) -> str:
    """Arms of which two or more never rose above their start, or are all but perfect, hide what they differ in."""
    ends = [_ends(list(arm.values())) for arm in setting.stratum.arms]
    arms = setting.contrast.arms
    blank = [arm.label for arm, (start, end) in zip(arms, ends, strict=True) if math.isnan(end - start)]
    if blank:
        return f"no accuracy was recorded for {' and '.join(blank)}"
    floor = [arm.label for arm, (start, end) in zip(arms, ends, strict=True) if end < start + LEARNED]
    ceiling = [arm.label for arm, (_, end) in zip(arms, ends, strict=True) if end > CEILING]
    if len(floor) > 1:
        return (
            f"at the floor: accuracy of {' and '.join(floor)} ends less than {100 * LEARNED:.0f} points above its start"
        )
    if len(ceiling) > 1:
        return f"at the ceiling: accuracy of {' and '.join(ceiling)} ends above {100 * CEILING:.0f} %"
    return ""


def stable(setting: Setting, runs: Sequence[Run]) -> str:
    """No arm diverged: fewer than half of its runs end more than ten points below their own best."""
    lost = diverged_arms(setting)
    return f"diverged: {', '.join(lost)}" if lost else ""


def diverged_arms(setting: Setting) -> list[str]:
    """Arms half of whose runs diverged, with the count; those of which fewer did are left in without a word."""
    found = []
    for arm, runs in zip(setting.contrast.arms, setting.stratum.arms, strict=True):
        lost = sum(map(diverged, runs.values()))
        found += [f"{arm.label} in {lost} of {len(runs)} runs"] if 2 * lost >= len(runs) else []
    return found


def diverged(run: Run) -> bool:
    """Whether the accuracy of a run's samples, a mean of ten steps, ends more than ten points below its own best."""
    accuracy = run.series("train", "accuracy").dropna()
    if len(accuracy) < SMOOTHED:
        return False
    smooth = np.convolve(accuracy, np.ones(SMOOTHED) / SMOOTHED, mode="valid")
    return bool(smooth.max() - smooth[-1] > LOST)


def _ends(runs: Sequence[Run]) -> tuple[float, float]:
    """Mean accuracy at the start and at the end: of samples while training, or held out where none were sampled."""
    pairs = []
    for run in runs:
        values = run.series("train", "accuracy").dropna()
        values = values if len(values) else run.series("eval", "eval/accuracy_sampled").dropna()
        few = max(1, min(SMOOTHED, math.floor(LATE * len(values))))
        pairs.append((values.iloc[:few].mean(), values.iloc[-few:].mean()))
    start, end = np.mean(pairs, axis=0).tolist()
    return start, end
