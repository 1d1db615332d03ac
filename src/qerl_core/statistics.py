"""The statistics of this project, as pure functions of numbers.

There are two kinds of mean. The accuracy of one run is a mean over held-out questions; its standard error has a part
from the choice of questions and a part from sampling (formulas in docs/evaluation.md). An effect is a mean over seeds
or base models, with Student's t, whose intervals are honest for as few as five seeds. What has no such form is
resampled (qerl_studies/runs/resampling.py).

Left out: tests by rank or sign, which five seeds can never bring below p = 0.06; the correction for a finite pool of
questions; the sampling part of pass@k and maj@n, which are not means over samples. SciPy is imported where it is
needed, because composing a config imports this module and should not wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from qerl_core.checks import require
from qerl_core.metrics.compute import mean, sample_std

CONFIDENCE = 0.95  # of every interval
MIN_UNITS = 5  # below this number of seeds or bases, they alone give the degrees of freedom
POWER = 0.8  # at which an effect counts as detectable

Samples = Sequence[Sequence[float]]  # (questions, samples)


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` units (questions, seeds or bases), its standard error, and the degrees of freedom of the error.

    `stderr` is NaN if nothing was repeated, and 0 if all repetitions gave the same number: then they say nothing about
    chance, and no test is made, unless the number is `exact`, that is, known to have no chance in it. With n = 1 in a
    mean over questions and seeds, the error is that of the questions alone.

    `stderr_questions` is the part of the error that more samples, seeds or bases would leave: other questions might
    have been asked. `stderr_sampling` is that of sampling the same questions again. Both are None where they are not
    known.
    """

    value: float
    stderr: float
    n: int
    df: float = math.nan
    stderr_questions: float | None = None
    stderr_sampling: float | None = None
    exact: bool = False
    least: float = -math.inf
    most: float = math.inf

    @property
    def known_stderr(self) -> float | None:
        """The standard error; None if nothing was repeated."""
        return None if math.isnan(self.stderr) else self.stderr

    @property
    def has_interval(self) -> bool:
        """Whether repetitions differ: a single one, or some that are all alike, say nothing of an error."""
        return self.stderr > 0

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % interval."""
        return t_quantile((1 + CONFIDENCE) / 2, self.df) * self.stderr if self.stderr > 0 else self.stderr

    @property
    def low(self) -> float:
        return max(self.value - self.half_width, self.least)  # NaN stays

    @property
    def high(self) -> float:
        return min(self.value + self.half_width, self.most)

    def interval_text(self, show: Callable[[float], str]) -> str:
        """[low, high], each as `show` has it; - where nothing varied."""
        return f"[{show(self.low)}, {show(self.high)}]" if self.has_interval else "-"

    def text(self, show: Callable[[float], str], end: Callable[[float], str] | None = None) -> str:
        """Value and interval; the value alone where nothing varied."""
        return f"{show(self.value)} {self.interval_text(end or show)}" if self.has_interval else show(self.value)

    def ends(self, level: float) -> tuple[float, float]:
        """The interval that a two-sided test at `level` leaves."""
        half = t_quantile(1 - level / 2, self.df) * self.stderr
        return self.value - half, self.value + half

    @property
    def identical(self) -> bool:
        """Whether several repetitions gave one number: they are copies, or no seed changes it."""
        return self.n > 1 and self.stderr == 0

    @property
    def alike(self) -> str:
        """Why there is no interval, in words."""
        return "a single seed" if self.n == 1 else f"the same in all {self.n} repetitions"

    def p_above(self, bound: float) -> float:
        """One-sided p-value of the hypothesis that the true mean is at most `bound`; NaN if it cannot be tested."""
        if self.stderr > 0:
            return t_tail((self.value - bound) / self.stderr, self.df)
        return float(self.value <= bound) if self.identical and self.exact else math.nan

    def p_below(self, bound: float) -> float:
        """One-sided p-value of the hypothesis that the true mean is at least `bound`."""
        return Estimate(-self.value, self.stderr, self.n, self.df, exact=self.exact).p_above(-bound)

    def p_within(self, margin: float) -> float:
        """p-value of the hypothesis that the true mean is `margin` or more away from 0: two one-sided tests."""
        return max(self.p_above(-margin), self.p_below(margin))

    def p_outside(self, margin: float) -> float:
        """p-value of the hypothesis that the true mean is within `margin` of 0: the smaller one-sided test, doubled."""
        return min(2 * min(self.p_above(margin), self.p_below(-margin)), 1.0)

    def power(self, effect: float, level: float) -> float:
        """The probability that a one-sided test at `level` finds a true mean of `effect`; NaN without a spread.

        The test statistic then follows a noncentral t distribution with noncentrality effect / stderr.
        """
        from scipy import stats

        if not self.stderr > 0:
            return math.nan
        return float(stats.nct.sf(float(stats.t.isf(level, self.df)), self.df, effect / self.stderr))

    def detectable(self, level: float, power: float = POWER) -> float:
        """The smallest true mean that a one-sided test at `level` finds with `power`; NaN if it cannot be tested."""
        from scipy import optimize, stats

        if not self.stderr > 0:
            return 0.0 if self.identical and self.exact else math.nan
        upper = 2.0 * (float(stats.t.isf(level, self.df)) + 10.0) * self.stderr  # found with more power than asked for
        root = optimize.root_scalar(lambda effect: self.power(effect, level) - power, bracket=(0.0, upper))
        return float(root.root)

    def with_repetitions(self, n: int) -> Estimate:
        """The estimate that `n` repetitions of the same spread would give."""
        from_questions = (self.stderr_questions or 0.0) ** 2
        from_repetitions = (self.stderr**2 - from_questions) * self.n / n
        df = self.df * (n - 1) / (self.n - 1)
        return Estimate(self.value, math.sqrt(from_questions + from_repetitions), n, df, self.stderr_questions)

    def repetitions_needed(self, effect: float, level: float, power: float = POWER, most: int = 4096) -> int | None:
        """The fewest repetitions with which a true mean of `effect` is found with `power`.

        None if that takes more than `most`; no number suffices if the error from the questions alone is too large.
        """

        def enough(n: int) -> bool:
            return self.with_repetitions(n).power(effect, level) >= power

        if not (self.stderr > 0 and self.n > 1 and enough(most)):
            return None
        low, high = 1, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high


def t_quantile(probability: float, df: float) -> float:
    """Quantile of Student's t."""
    from scipy import stats

    return float(stats.t.ppf(probability, df))


def t_tail(value: float, df: float) -> float:
    """Probability that Student's t is larger than `value`."""
    from scipy import stats

    return float(stats.t.sf(value, df))


# --- accuracies: means over questions --------------------------------------------------------------------------------


def over_questions(per_question: Sequence[float]) -> Estimate:
    """Mean of one number per question. The error of a single question is NaN: it says nothing about others."""
    values = list(per_question)
    stderr = sample_std(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return Estimate(mean(values), stderr, len(values), len(values) - 1)


def over_samples(samples: Samples, sampling_variances: Sequence[float] | None = None) -> Estimate:
    """Mean over questions of the mean over samples.

    Samples of one question are not independent, so the error is over questions. Its sampling part comes from the
    variance within questions, s^2 / m for m samples, or from `sampling_variances` where the samples are not plain ones.
    The rest is the part of questions, 0 if the difference is negative by chance.
    """
    whole = over_questions([mean(list(row)) for row in samples])
    if sampling_variances is None:
        if min(len(row) for row in samples) < 2:
            return whole
        sampling_variances = [sample_std(list(row)) ** 2 / len(row) for row in samples]
    sampling = mean(list(sampling_variances)) / whole.n
    questions = max(0.0, whole.stderr**2 - sampling) ** 0.5 if whole.n > 1 else None
    return Estimate(whole.value, whole.stderr, whole.n, whole.df, questions, sampling**0.5)


def paired_difference(first: Samples, second: Samples) -> Estimate:
    """Mean of second - first over the same questions in the same order.

    The difficulty of a question cancels, so the error is usually far below that of two separate accuracies. Sample i of
    both may share its random numbers, as in two evaluations of one run, so the sampling part is that of the
    differences. Only if the numbers of samples differ are the two taken as independent, and their variances added.
    """
    assert len(first) == len(second), (len(first), len(second))
    pairs = list(zip(first, second, strict=True))
    if all(len(before) == len(after) for before, after in pairs):
        return over_samples([[y - x for x, y in zip(before, after, strict=True)] for before, after in pairs])
    gains = [[mean(list(after)) - mean(list(before))] for before, after in pairs]
    if min(len(row) for row in (*first, *second)) < 2:
        return over_samples(gains)
    return over_samples(gains, [sum(sample_std(list(row)) ** 2 / len(row) for row in pair) for pair in pairs])


def pass_at_k(samples: Samples, k: int) -> Estimate:
    """Share of questions that at least one of k samples answers, unbiased."""
    return over_questions([found_among(k, len(row), round(sum(row))) for row in samples])


@cache
def found_among(k: int, samples: int, correct: int) -> float:
    """The probability that k of `samples` answers hold one of the correct: 1 - C(m - c, k) / C(m, k) with c of m
    (Chen et al. 2021, arXiv 2107.03374).
    """
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


# --- effects: means over seeds and bases -----------------------------------------------------------------------------


def mean_ci(values: ArrayLike) -> Estimate:
    """Mean of independent numbers, one per seed or base. ConfigError without any; the error of a single one is NaN."""
    numbers = np.asarray(values, dtype=float)
    require(numbers.size >= 1, "an interval needs at least one run")
    stderr = _standard_error(numbers) if numbers.size > 1 else math.nan
    return Estimate(math.fsum(numbers) / numbers.size, stderr, numbers.size, numbers.size - 1)


def mean_ci_crossed(values: np.ndarray) -> Estimate:
    """Mean of numbers (questions, units), or (questions,) of one unit, with an interval that holds for other questions
    and other units; units are seeds, or bases whose seeds were averaged. For a paired comparison pass differences.

    The variance of a two-way layout without repetition is (MS_q + MS_u - MS_e) / QU, and at least the larger of MS_q /
    QU and MS_u / QU. Degrees of freedom follow Satterthwaite; below MIN_UNITS they are those of the units, because a
    mean square of so few units is too uncertain to be called small. With one unit the error is over questions only; if
    all units agree on every question, it is 0.
    """
    table = values.reshape(len(values), -1).astype(float)  # (questions, units)
    q, u = table.shape
    require(q > 1, f"a comparison by question needs at least two questions, got {q}")
    value = float(table.mean())
    if u == 1:
        return Estimate(value, _standard_error(table[:, 0]), 1, q - 1)
    if (table == table[:, :1]).all():
        return Estimate(value, 0.0, u, 1.0)
    by_question, by_unit = table.mean(1), table.mean(0)
    residual = table - by_question[:, None] - by_unit[None, :] + value
    mean_squares = (
        (ms_q := u * float(by_question.var(ddof=1)), df_q := q - 1),
        (ms_u := q * float(by_unit.var(ddof=1)), df_u := u - 1),
        (ms_e := float((residual**2).sum()) / ((q - 1) * (u - 1)), (q - 1) * (u - 1)),
    )
    total = ms_q + ms_u - ms_e
    df = total**2 / sum(square**2 / df for square, df in mean_squares)
    for least, df_least in ((ms_q, df_q), (ms_u, df_u)):
        if least >= total:
            total, df = least, float(df_least)
    df = min(df, df_u) if u < MIN_UNITS else df
    return Estimate(value, math.sqrt(total / (q * u)), u, df, math.sqrt(max(0.0, ms_q - ms_e) / (q * u)))


def holm(p_values: Sequence[float] | np.ndarray) -> np.ndarray:
    """p-values (m,) corrected for multiple comparisons (Holm 1979); NaN, for a test that was not made, stays NaN."""
    p = np.asarray(p_values, dtype=float)
    adjusted = np.full(p.shape, np.nan)
    tested = np.flatnonzero(~np.isnan(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)))
    return adjusted


def _standard_error(values: np.ndarray) -> float:
    if (values == values[0]).all():
        return 0.0  # rounding in the mean would give a tiny number
    return float(values.std(ddof=1)) / math.sqrt(len(values))
