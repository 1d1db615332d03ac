"""Every statistic of this project, as pure functions of arrays: how sure is a number that came from a few seeds?

Means and paired differences come with Student's t, whose assumptions are few and whose intervals are honest for five
seeds; what has no such form (interquartile means, profiles) is resampled. Functions that draw random numbers are given
their generator. Resampling, interquartile mean, profiles and probability of improvement follow Agarwal et al. 2021,
"Deep reinforcement learning at the edge of the statistical precipice". Left out: tests by rank or sign, which five
seeds can never bring below p = 0.06.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, stats

from qerl_bench.checks import require

LEVEL = 0.95  # of every interval
FEW = 5  # units, below which they alone give the degrees of freedom
POWER = 0.8  # at which an effect counts as detectable


@dataclass(frozen=True)
class Mean:
    """A mean, its standard error and their degrees of freedom; `n` is the number of seeds, or of what was repeated.

    The error is NaN where nothing was repeated. With n = 1 and an error, that error is of the questions alone. An error
    of 0 means that all repetitions gave the same: they say nothing about chance, and no test is made of them. `fixed`
    is the part of the variance, error squared, that more repetitions would not make smaller: that of the questions.
    """

    mean: float
    error: float
    df: float
    n: int
    fixed: float = 0.0

    @property
    def half(self) -> float:
        """Half the width of the 95 % interval of Student's t."""
        return float(stats.t.ppf((1 + LEVEL) / 2, self.df)) * self.error if self.error > 0 else self.error

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    @property
    def identical(self) -> bool:
        """Whether there are several repetitions, and no spread among them: copies, or a number that no seed moves."""
        return self.n > 1 and self.error == 0

    @property
    def excludes_zero(self) -> bool:
        return abs(self.mean) > self.half

    def p_above(self, bound: float) -> float:
        """One-sided p-value of the hypothesis that the true mean is `bound` or less; NaN without an error or spread."""
        return float(stats.t.sf((self.mean - bound) / self.error, self.df)) if self.error > 0 else math.nan

    def p_below(self, bound: float) -> float:
        """One-sided p-value of the hypothesis that the true mean is `bound` or more."""
        return Mean(-self.mean, self.error, self.df, self.n).p_above(-bound)

    def p_within(self, margin: float) -> float:
        """p-value of the hypothesis that the true mean lies at least `margin` from 0: both one-sided tests in one."""
        return max(self.p_above(-margin), self.p_below(margin))

    def p_outside(self, margin: float) -> float:
        """One-sided p-value, doubled for the choice of side, of the hypothesis that it lies within `margin` of 0."""
        return min(2 * min(self.p_above(margin), self.p_below(-margin)), 1.0)

    def power(self, effect: float, level: float) -> float:
        """The probability that a one-sided test at `level` finds a true mean of `effect`; NaN without a spread.

        The test statistic is then noncentral t with noncentrality effect/error.
        """
        critical = float(stats.t.isf(level, self.df))
        return float(stats.nct.sf(critical, self.df, effect / self.error)) if self.error > 0 else math.nan

    def detectable(self, level: float, power: float = POWER) -> float:
        """The smallest true mean that a one-sided test at `level` finds with `power`; NaN without spread."""
        if not self.error > 0:
            return math.nan
        top = 2.0 * (float(stats.t.isf(level, self.df)) + 10.0) * self.error  # found with more power than is asked for
        found = optimize.root_scalar(lambda effect: self.power(effect, level) - power, bracket=(0.0, top))
        return float(found.root)

    def repeated(self, n: int) -> Mean:
        """What `n` repetitions of the same spread would give in place of those that there are."""
        spread = (self.error**2 - self.fixed) * self.n / n
        return Mean(self.mean, math.sqrt(self.fixed + spread), self.df * (n - 1) / (self.n - 1), n, self.fixed)

    def needed(self, effect: float, level: float, power: float = POWER, most: int = 4096) -> int | None:
        """The fewest repetitions at which a true mean of `effect` is found with `power`; None if `most` are too few.

        They never suffice where the questions alone leave too much to chance.
        """
        if not (self.error > 0 and self.n > 1):
            return None
        low, high = 1, most
        if self.repeated(high).detectable(level, power) > effect:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.repeated(middle).detectable(level, power) <= effect else (middle, high)
        return high


def interval(values: Sequence[float] | np.ndarray) -> Mean:
    """Mean of independent numbers, one per seed. With a single one the error is NaN. Raises ConfigError without any."""
    found = np.asarray(values, dtype=float)
    require(found.size >= 1, "an interval needs at least one run")
    error = _standard_error(found) if found.size > 1 else math.nan
    return Mean(math.fsum(found) / found.size, error, found.size - 1, found.size)


def crossed(values: np.ndarray) -> Mean:
    """Mean of numbers (questions, units), or (questions,) of one unit; for paired comparisons, of differences.

    Units are seeds, or bases with their seeds averaged. Both questions and units are samples: the interval speaks for
    other questions and other units. The variance of a two-way layout without repetition is (MS_q + MS_u - MS_e) / QU,
    so that what is left (e) counts once; it is never taken to be less than the larger of MS_q and MS_u gives. Degrees
    of freedom after Satterthwaite, and below five units those of the units, whose own mean square is then too uncertain
    to be called small. With one unit the questions alone count; several that agree on every question have
    an error of 0.
    """
    table = values.reshape(len(values), -1).astype(float)  # (questions, units)
    q, u = table.shape
    require(q > 1, f"a comparison by question needs at least two questions, got {q}")
    mean = float(table.mean())
    if u == 1:
        return Mean(mean, _standard_error(table[:, 0]), q - 1, 1)
    if (table == table[:, :1]).all():
        return Mean(mean, 0.0, 1.0, u)
    by_question, by_unit = table.mean(1), table.mean(0)
    rest = table - by_question[:, None] - by_unit[None, :] + mean
    squares = {  # mean squares and their degrees of freedom
        "questions": (u * float(by_question.var(ddof=1)), q - 1),
        "units": (q * float(by_unit.var(ddof=1)), u - 1),
        "rest": (float((rest**2).sum()) / ((q - 1) * (u - 1)), (q - 1) * (u - 1)),
    }
    (ms_q, df_q), (ms_u, df_u), (ms_e, _) = squares.values()
    total = ms_q + ms_u - ms_e
    df = total**2 / sum(square**2 / df for square, df in squares.values())
    for least, its_df in ((ms_q, df_q), (ms_u, df_u)):
        if least >= total:
            total, df = least, float(its_df)
    df = min(df, df_u) if u < FEW else df
    return Mean(mean, math.sqrt(total / (q * u)), df, u, max(0.0, ms_q - ms_e) / (q * u))


@dataclass(frozen=True)
class Hierarchy:
    """An effect over several bases. `between` is the standard deviation of the true effects of bases, estimated."""

    whole: Mean  # over bases
    by_base: tuple[Mean, ...]
    between: float
    prediction: tuple[float, float] | None  # 95 % interval for one more base of as many seeds; None below three bases


def over_bases(values: np.ndarray) -> Hierarchy:
    """Random-effects mean of numbers (questions, bases, seeds), each base with as many seeds, one question if 1.

    Bases are the unit, with equal weights: the mean over bases with Student's t of B - 1 degrees of freedom is exact
    whatever the spread within bases is. So is the prediction interval, for the mean of one more base.
    """
    q, b, s = values.shape
    require(b > 1, f"an effect over bases needs at least two of them, got {b}")
    means = values.mean(2)  # (questions, bases)
    whole = crossed(means) if q > 1 else interval(means[0])
    by_base = tuple(crossed(values[:, i]) if q > 1 else interval(values[0, i]) for i in range(b))
    spread = float(means.mean(0).var(ddof=1))
    within = float(values.mean(0).var(axis=1, ddof=1).mean()) / s if s > 1 else 0.0
    between = math.sqrt(max(0.0, spread - within))
    half = float(stats.t.ppf((1 + LEVEL) / 2, b - 1)) * math.sqrt(spread * (1 + 1 / b))
    prediction = (whole.mean - half, whole.mean + half) if b > 2 else None
    return Hierarchy(whole, by_base, between, prediction)


def holm(p_values: Sequence[float] | np.ndarray) -> np.ndarray:
    """p-values (m,) adjusted for having been asked together (Holm 1979); NaN, for what was not tested, stays NaN."""
    p = np.asarray(p_values, dtype=float)
    adjusted = np.full(p.shape, np.nan)
    tested = np.flatnonzero(~np.isnan(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)))
    return adjusted


# --- several runs of several tasks -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resampled:
    """A statistic of the data and its percentile interval over resamples; arrays if the statistic is one."""

    value: Any
    low: Any
    high: Any


def interquartile_mean(scores: np.ndarray) -> float:
    """Mean of the middle half of all scores, whatever their shape. Needs several tasks, or many runs, to mean much."""
    return float(stats.trim_mean(scores.ravel(), 0.25))


def stratified_bootstrap(
    scores: Sequence[np.ndarray],
    statistic: Callable[..., Any],
    generator: np.random.Generator,
    draws: int = 2000,
    level: float = LEVEL,
) -> Resampled:
    """Interval of `statistic(*scores)`; each array is (runs, tasks), and runs are drawn anew within each task.

    For a paired comparison give the array of differences, and runs stay in their pairs.
    """
    require(draws >= 1, f"draws must be at least 1, got {draws}")
    tables = [table.reshape(len(table), -1) for table in scores]
    resampled = []
    for _ in range(draws):
        rows = [generator.integers(len(table), size=table.shape) for table in tables]
        resampled.append(statistic(*(np.take_along_axis(t, row, axis=0) for t, row in zip(tables, rows, strict=True))))
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return Resampled(statistic(*tables), low, high)


def probability_of_improvement(scores: np.ndarray, others: np.ndarray) -> float:
    """P(a run of `scores` beats one of `others` on the same task), ties counting half; both (runs, tasks)."""
    difference = scores.reshape(len(scores), 1, -1) - others.reshape(1, len(others), -1)  # (runs, others' runs, tasks)
    return float((np.sign(difference) / 2 + 0.5).mean())


def performance_profile(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Share of all runs and tasks whose score is above each threshold: (thresholds,), falling from 1 to 0."""
    return (scores.reshape(-1, 1) > thresholds).mean(0)


# --- learning curves -------------------------------------------------------------------------------------------------


def area_under_curve(steps: np.ndarray, values: np.ndarray) -> float:
    """Mean height of a curve over its steps (trapezoids), in units of its values; points that are NaN are left out."""
    known = ~np.isnan(values)
    steps, values = steps[known], values[known]
    require(len(steps) > 0, "the area under a curve needs at least one number")
    return float(np.trapezoid(values, steps) / (steps[-1] - steps[0])) if len(steps) > 1 else float(values[0])


def steps_to_threshold(steps: np.ndarray, values: np.ndarray, threshold: float, window: int) -> float:
    """The first step at which the mean of the last `window` values reaches `threshold`; infinite if none does."""
    means = np.convolve(values, np.ones(window) / window, mode="valid") if len(values) >= window else np.array([])
    reached = np.flatnonzero(means >= threshold)
    return float(steps[reached[0] + window - 1]) if len(reached) else math.inf


# --- what may be compared --------------------------------------------------------------------------------------------


def missing_seeds(settings: Mapping[str, Collection[int]]) -> dict[str, list[int]]:
    """For each setting the seeds that another one has and it has not; settings that lack none are left out."""
    wanted = {seed for seeds in settings.values() for seed in seeds}
    lacking = {name: sorted(wanted.difference(seeds)) for name, seeds in settings.items()}
    return {name: seeds for name, seeds in lacking.items() if seeds}


def require_complete(settings: Mapping[str, Collection[int]]) -> None:
    """Raise ConfigError with the list of missing runs unless every setting has the same seeds."""
    missing = [f"{name} seed={','.join(map(str, seeds))}" for name, seeds in missing_seeds(settings).items()]
    require(
        not missing,
        f"the grid is incomplete, and a comparison of what is there would be one of different seeds. Missing: "
        f"{'; '.join(missing)}. Run these, or leave their seeds out everywhere",
    )


def _standard_error(values: np.ndarray) -> float:
    if (values == values[0]).all():
        return 0.0  # and not what rounding makes of it
    return float(values.std(ddof=1)) / math.sqrt(len(values))
