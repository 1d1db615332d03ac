"""The mean of differences with its interval: over bases if there are several, and otherwise over the seeds of the one.

Questions are `drawn` if the interval is to hold for other questions too, and `fixed` if it is about those that were
asked. Numbers of a whole run, such as a reward, have no questions that could be drawn.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd

from qerl_core.statistics import CONFIDENCE, Estimate, mean_ci, mean_ci_crossed, over_questions, t_quantile
from qerl_studies.effects.pairs import Arm, Number, average_seeds, paired
from qerl_studies.runs.load import Run

Questions = Literal["drawn", "fixed"]
SPREAD = 1e-12  # sum of squares, up to which numbers are all alike


def over_units(table: np.ndarray, questions: Questions) -> Estimate:
    """Mean of numbers (questions, units), or (1, units) for a number of a whole run."""
    return mean_ci_crossed(table) if questions == "drawn" and len(table) > 1 else mean_ci(table.mean(axis=0))


def over_known(values: pd.Series) -> Estimate:
    """Mean of numbers by unit over those that are known; of no number if none is."""
    known = values.dropna()
    return mean_ci(known) if len(known) else Estimate(math.nan, math.nan, 0)


@dataclass(frozen=True)
class Share(Estimate):
    """A share of `n` questions that were asked once, with Wilson's interval, which none or all right have too."""

    @property
    def has_interval(self) -> bool:
        return True

    @property
    def low(self) -> float:
        return self._wilson[0]

    @property
    def high(self) -> float:
        return self._wilson[1]

    @property
    def _wilson(self) -> tuple[float, float]:
        from scipy.stats import binomtest

        found = binomtest(round(self.value * self.n), self.n).proportion_ci(CONFIDENCE, method="wilson")
        return float(found.low), float(found.high)


def of_shares(mean: Estimate) -> Estimate:
    """A mean of shares, whose interval does not leave 0 to 1."""
    return replace(mean, least=0.0, most=1.0)


def share(found: Sequence[bool]) -> Share:
    """The share of those that are true."""
    whole = over_questions([float(one) for one in found])
    return Share(whole.value, whole.stderr, whole.n, whole.df)


def slope(x: Sequence[float], y: Sequence[float], groups: Sequence[Sequence[Hashable]]) -> Estimate:
    """The least-squares slope of `y` over `x` (n,), beside a constant for each value of every one of `groups` (n,).

    Student's t with as many degrees of freedom as numbers are more than constants and slope. The error is NaN without
    any, and where `x` differs within no group.
    """
    dummies = [pd.get_dummies([*group]).to_numpy(float) for group in groups]
    constants = np.column_stack([np.ones(len(x)), *dummies])
    columns = np.column_stack([x, y])
    within, rest = (columns - constants @ np.linalg.lstsq(constants, columns, rcond=None)[0]).T
    spread, df = float(within @ within), len(x) - int(np.linalg.matrix_rank(constants)) - 1
    found = float(within @ rest) / spread if spread > SPREAD else math.nan
    residual = rest - found * within
    known = df > 0 and spread > SPREAD
    return Estimate(found, math.sqrt(float(residual @ residual) / df / spread) if known else math.nan, len(x), df)


def least_squares(treated: pd.Series, control: pd.Series, place: Mapping[Any, str]) -> Estimate:
    """The difference of two arms, each a number by unit, with an effect for each `place` (a session) and without pairs.

    Narrower than pairs where the runs of a unit are not alike, and too narrow where they go against each other: what is
    false then, studies/planting/looks.py counts. `n` is the number of runs.
    """
    numbers = pd.concat([treated, control])
    sides = np.repeat([1.0, 0.0], [len(treated), len(control)])
    return slope(sides.tolist(), numbers.tolist(), [[place[unit] for unit in numbers.index]])


def correlation(treated: pd.Series, control: pd.Series) -> float:
    """Of two arms over the units that both have; pairs help where it is above 0. NaN below three, or without spread."""
    columns = pd.concat([treated, control], axis=1, join="inner").to_numpy().T
    return float(np.corrcoef(columns)[0, 1]) if columns.shape[1] > 2 and columns.std(axis=1).all() else math.nan


@dataclass(frozen=True, eq=False)
class Effect:
    """A contrast in one setting: the numbers of each arm (questions, cells), and what is made of them.

    A number of the whole run is one row. `signs` are those of the arms. Units are bases if there are several, else the
    seeds of the only one. With one arm it is a level.
    """

    arms: tuple[pd.DataFrame, ...]
    signs: tuple[int, ...] = (1, -1)

    @cached_property
    def differences(self) -> pd.DataFrame:
        """The contrast in each question and cell."""
        first, *others = (sign * table for sign, table in zip(self.signs, self.arms, strict=True))
        return sum(others, first)

    @cached_property
    def table(self) -> np.ndarray:
        """The contrast in each question and unit."""
        return average_seeds(self.differences).to_numpy()

    @cached_property
    def whole(self) -> Estimate:
        """Over units, and over questions that are drawn."""
        return over_units(self.table, "drawn")

    @cached_property
    def fixed(self) -> Estimate:
        """Over units, for the questions that were asked."""
        return over_units(self.table, "fixed")

    @property
    def by_unit(self) -> np.ndarray:
        return self.table.mean(axis=0)

    @property
    def levels(self) -> tuple[float, ...]:
        """The mean of each arm."""
        return tuple(float(one.mean(skipna=False)) for one in self.by_arm)

    @cached_property
    def correlation(self) -> float:
        """Of two arms over units; NaN of four."""
        return correlation(*self.by_arm) if len(self.arms) == 2 else math.nan

    @cached_property
    def by_arm(self) -> list[pd.Series]:
        """The numbers of each arm by unit."""
        return [average_seeds(table).mean(skipna=False) for table in self.arms]

    @cached_property
    def by_base(self) -> tuple[Estimate, ...]:
        """The effect on each base, over its seeds."""
        table = self.differences.to_numpy()
        return tuple(over_units(table[:, self._bases == base], "drawn") for base in self._bases.unique())

    @property
    def between(self) -> float:
        """The estimated standard deviation of the bases' true effects."""
        cells = self.differences.to_numpy().mean(axis=0)
        each = [cells[self._bases == base].var(ddof=1) for base in self._bases.unique()] if self.seeds > 1 else [0.0]
        within = float(np.mean(each)) / self.seeds
        return math.sqrt(max(0.0, float(self.by_unit.var(ddof=1)) - within))

    @property
    def prediction(self) -> tuple[float, float] | None:
        """The 95 % interval for one more base of as many seeds; None below three bases.

        Bases have equal weights, so Student's t is exact whatever the spread within them.
        """
        count = len(self.by_unit)
        if self.unit != "base" or count < 3:
            return None
        spread = math.sqrt(float(self.by_unit.var(ddof=1)) * (1 + 1 / count))
        half_width = t_quantile((1 + CONFIDENCE) / 2, count - 1) * spread
        return self.whole.value - half_width, self.whole.value + half_width

    @property
    def unit(self) -> str:
        return "base" if self._bases.nunique() > 1 else "seed"

    @property
    def seeds(self) -> int:
        """Of each base."""
        return int(self._bases.value_counts().max())

    @property
    def questions(self) -> int:
        """Averaged over; 1 for a number of the whole run."""
        return len(self.table)

    @property
    def _bases(self) -> pd.Index:
        """The base of each cell."""
        return self.arms[0].columns.get_level_values("base")

    @property
    def origin(self) -> str:
        """What was averaged: 16 bases × 2 seeds × 256 questions drawn, 15 df, correlation +0.31 of the arms."""
        units = f"{self.whole.n} {self.unit}{'s' if self.whole.n > 1 else ''}"
        seeds = f" × {self.seeds} seed{'s' if self.seeds > 1 else ''}" if self.unit == "base" else ""
        questions = f" × {self.questions} questions drawn" if self.questions > 1 else ""
        freedom = f", {self.whole.df:.0f} df" if self.whole.has_interval else ""
        together = "" if math.isnan(self.correlation) else f", correlation {self.correlation:+.2f}"
        return units + seeds + questions + freedom + together


def effect_of(
    arms: Sequence[Arm | Sequence[Run]], number: Number, signs: tuple[int, ...] = (1, -1), any_machine: bool = False
) -> Effect:
    """The first arm minus the second, or what `signs` make of more arms, in pairs. Raises ConfigError as `paired`."""
    return Effect(tuple(paired(arms, number, any_machine=any_machine)), signs)
