"""From matched runs to an effect: differences within base and seed (and question), their mean, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd

from qerl_bench.checks import ConfigError, require
from qerl_bench.claims.match import Contrast, Stratum, Where, labels, match, missing
from qerl_bench.claims.measure import Measure
from qerl_bench.statistics import Hierarchy, Mean, crossed, interval, over_bases
from qerl_bench.study.load import Run


@dataclass(frozen=True)
class Effect:
    """A contrast in one setting. The units are bases where there are several, and seeds of the one base otherwise."""

    whole: Mean
    unit: str  # base or seed
    seeds: int  # of each base
    questions: int  # that it was averaged over; 1 for a number of the whole run
    bases: Hierarchy | None = None

    @property
    def origin(self) -> str:
        """What it was averaged over, for readers: 16 bases x 2 seeds x 256 questions, 15 df."""
        one = f"{self.whole.n} {self.unit}{'s' if self.whole.n > 1 else ''}"
        each = f" × {self.seeds} seed{'s' if self.seeds > 1 else ''}" if self.unit == "base" else ""
        asked = f" × {self.questions} questions" if self.questions > 1 else ""
        return one + each + asked + (f", {self.whole.df:.0f} df" if self.whole.error > 0 else "")


@dataclass(frozen=True)
class Setting:
    """One contrast among runs that share all else. `effect` is None where it cannot be taken; `reason` says why."""

    contrast: Contrast
    stratum: Stratum
    label: str
    effect: Effect | None
    reason: str = ""
    levels: tuple[float, ...] = ()  # the mean of each arm, over bases, seeds and questions


def settings(measure: Measure, contrast: Contrast, where: Sequence[Where], runs: Sequence[Run]) -> list[Setting]:
    """The contrast in each setting of `runs` that has all arms, with its effect where the grid is complete.

    Raises ConfigError if arms were asked different questions, and, once for all of them, if runs lack the number.
    """
    strata = match(contrast, where, runs)
    complete = [stratum for stratum in strata if not missing(contrast, stratum) and not stratum.blocks]
    values = measured(measure, [run for stratum in complete for run in stratum.runs])
    return [_setting(contrast, *pair, values) for pair in zip(strata, labels(strata), strict=True)]


def holds(condition: Where, stratum: Stratum) -> bool:
    """Whether every arm of the stratum meets the condition."""
    return all(condition.holds(stratum.facts | variant) for variant in stratum.variants)


def measured(measure: Measure, runs: Sequence[Run]) -> dict[Path, pd.Series]:
    """The number of each run, or its numbers by question. One message for all runs that lack them."""
    values: dict[Path, pd.Series] = {}
    complaints: list[str] = []
    for run in runs:
        if run.path not in values:
            try:
                found = pd.Series(measure.of(run))
                usable = np.isfinite(found) & ((found > 0) | (not measure.ratio))
                require(bool(usable.all()), f"{run.name} has a number that cannot be compared (NaN, or 0 in a ratio)")
            except ConfigError as error:
                complaints.append(str(error))
                found = pd.Series([np.nan])
            values[run.path] = found.map(math.log) if measure.ratio else found
    require(
        not complaints,
        f"{measure.name} cannot be measured in {len(complaints)} of these runs: {'; '.join(complaints)}. "
        "Leave them out, or run them again",
    )
    return values


def _setting(contrast: Contrast, stratum: Stratum, label: str, values: dict[Path, pd.Series]) -> Setting:
    if lacking := missing(contrast, stratum):
        return Setting(contrast, stratum, label, None, f"incomplete grid, missing: {'; '.join(lacking)}")
    if torn := stratum.blocks:
        reason = f"its arms ran on different machines or library versions: {'; '.join(torn)}"
        return Setting(contrast, stratum, label, None, reason)
    levels = tuple(fmean(values[run.path].mean() for run in arm.values()) for arm in stratum.arms)
    return Setting(contrast, stratum, label, _effect(_differences(contrast, stratum, values)), "", levels)


def _differences(contrast: Contrast, stratum: Stratum, values: dict[Path, pd.Series]) -> np.ndarray:
    """The contrast within each base and seed: (questions, bases, seeds), one question where a run has one number."""
    columns = [
        sum(arm.sign * values[runs[cell].path] for arm, runs in zip(contrast.arms, stratum.arms, strict=True))
        for cell in stratum.cells
    ]
    table = pd.DataFrame(columns).T
    names = ", ".join(sorted({run.name for run in stratum.runs}))
    require(bool(table.notna().all(axis=None)), f"these runs were asked different questions: {names}")
    bases = len({base for base, _ in stratum.cells})
    return table.to_numpy().reshape(len(table), bases, -1)


def _effect(differences: np.ndarray) -> Effect:
    questions, bases, seeds = differences.shape
    if bases > 1:
        hierarchy = over_bases(differences)
        return Effect(hierarchy.whole, "base", seeds, questions, hierarchy)
    table = differences[:, 0]
    return Effect(crossed(table) if questions > 1 else interval(table[0]), "seed", seeds, questions)
