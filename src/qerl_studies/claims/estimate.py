"""From matched runs to an effect: differences within base and seed (and question), and their mean with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd

from qerl_core.checks import ConfigError, require
from qerl_core.statistics import CONFIDENCE, Estimate, mean_ci, mean_ci_crossed, t_quantile
from qerl_studies.claims.match import Contrast, Filter, Stratum, all_accept, labels, match, missing
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import Measure


@dataclass(frozen=True)
class Effect:
    """A contrast in one setting. The units of `whole` are bases if there are several, and seeds otherwise."""

    whole: Estimate
    unit: str  # base or seed
    seeds: int  # of each base
    questions: int  # averaged over; 1 for a number of the whole run
    bases: RandomEffects | None = None

    @property
    def origin(self) -> str:
        """What was averaged: 16 bases × 2 seeds × 256 questions, 15 df."""
        units = f"{self.whole.n} {self.unit}{'s' if self.whole.n > 1 else ''}"
        seeds = f" × {self.seeds} seed{'s' if self.seeds > 1 else ''}" if self.unit == "base" else ""
        questions = f" × {self.questions} questions" if self.questions > 1 else ""
        return units + seeds + questions + (f", {self.whole.df:.0f} df" if self.whole.stderr > 0 else "")


@dataclass(frozen=True)
class Comparison:
    """One contrast in one setting. `effect` is None if it cannot be computed; `reason` says why."""

    contrast: Contrast
    stratum: Stratum
    label: str
    effect: Effect | None
    reason: str = ""
    levels: tuple[float, ...] = ()  # the mean of each arm, over bases, seeds and questions
    by_cell: tuple[float, ...] = ()  # the contrast in each of stratum.cells, over questions

    def is_in(self, where: Sequence[Filter]) -> bool:
        """Whether every arm meets all conditions."""
        return all(all_accept(where, self.stratum.shared | variant) for variant in self.stratum.variants)


def compare(measure: Measure, contrast: Contrast, where: Sequence[Filter], runs: Sequence[Run]) -> list[Comparison]:
    """The contrast in each setting of `runs` that has all arms, with its effect if the grid is complete.

    Raises ConfigError if arms were asked different questions, and, once for all of them, if runs lack the number.
    """
    strata = match(contrast, where, runs)
    complete = [stratum for stratum in strata if not missing(contrast, stratum) and not stratum.mixed_machines]
    values = _numbers(measure, [run for stratum in complete for run in stratum.runs])
    return [_comparison(contrast, *pair, values) for pair in zip(strata, labels(strata), strict=True)]


def _numbers(measure: Measure, runs: Sequence[Run]) -> dict[Path, pd.Series]:
    """The number of each run, or its numbers by question. One ConfigError for all runs that lack them."""
    values: dict[Path, pd.Series] = {}
    errors: list[str] = []
    for run in runs:
        if run.path not in values:
            try:
                numbers = pd.Series(measure.metric(run))
                usable = np.isfinite(found := numbers.to_numpy(float)) & ((found > 0) | (not measure.ratio))
                require(bool(usable.all()), f"{run.name} has a number that cannot be compared (NaN, or 0 in a ratio)")
            except ConfigError as error:
                errors.append(str(error))
                numbers = pd.Series([np.nan])
            values[run.path] = numbers.map(math.log) if measure.ratio else numbers
    require(
        not errors,
        f"{measure.name} cannot be measured in {len(errors)} of these runs: {'; '.join(errors)}. Leave them out, or "
        "run them again",
    )
    return values


def _comparison(contrast: Contrast, stratum: Stratum, label: str, values: dict[Path, pd.Series]) -> Comparison:
    if lacking := missing(contrast, stratum):
        return Comparison(contrast, stratum, label, None, f"incomplete grid, missing: {'; '.join(lacking)}")
    if mixed := stratum.mixed_machines:
        reason = f"its arms ran on different machines or library versions: {'; '.join(mixed)}"
        return Comparison(contrast, stratum, label, None, reason)
    levels = tuple(fmean(values[run.path].mean() for run in arm.values()) for arm in stratum.arms)
    differences = _differences(contrast, stratum, values)
    by_cell = tuple(differences.mean(0).ravel().tolist())
    return Comparison(contrast, stratum, label, _effect(differences), "", levels, by_cell)


def _differences(contrast: Contrast, stratum: Stratum, values: dict[Path, pd.Series]) -> np.ndarray:
    """The contrast within each base and seed: (questions, bases, seeds); one question if a run has one number."""
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
        effects = over_bases(differences)
        return Effect(effects.whole, "base", seeds, questions, effects)
    table = differences[:, 0]
    return Effect(mean_ci_crossed(table) if questions > 1 else mean_ci(table[0]), "seed", seeds, questions)


@dataclass(frozen=True)
class RandomEffects:
    """An effect over several bases; `between` is the estimated standard deviation of the bases' true effects."""

    whole: Estimate  # over bases
    by_base: tuple[Estimate, ...]
    between: float
    prediction: tuple[float, float] | None  # 95 % interval for one more base of as many seeds; None below three bases


def over_bases(values: np.ndarray) -> RandomEffects:
    """Random-effects mean of numbers (questions, bases, seeds); questions = 1 for numbers of a whole run.

    Bases are the units and have equal weights, so Student's t with B - 1 degrees of freedom is exact whatever the
    spread within bases. The same holds for the prediction interval of the mean of one more base.
    """
    q, b, s = values.shape
    require(b > 1, f"an effect over bases needs at least two of them, got {b}")
    means = values.mean(2)  # (questions, bases)
    whole = mean_ci_crossed(means) if q > 1 else mean_ci(means[0])
    by_base = tuple(mean_ci_crossed(values[:, i]) if q > 1 else mean_ci(values[0, i]) for i in range(b))
    spread = float(means.mean(0).var(ddof=1))
    within = float(values.mean(0).var(axis=1, ddof=1).mean()) / s if s > 1 else 0.0
    half_width = t_quantile((1 + CONFIDENCE) / 2, b - 1) * math.sqrt(spread * (1 + 1 / b))
    prediction = (whole.value - half_width, whole.value + half_width) if b > 2 else None
    return RandomEffects(whole, by_base, math.sqrt(max(0.0, spread - within)), prediction)
