"""What a claim looks at: one number of a run, or one for each held-out question."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from qerl_bench.checks import require
from qerl_bench.statistics import Mean, area_under_curve, steps_to_threshold
from qerl_bench.study.load import Run

TAUGHT = "train/taught_frac"
WARM_UP = 0.1  # share of a run's steps, the first ones, that timings leave out
LATE = 0.2  # share of a run's steps, the last ones, that stand for its end
START = 5  # steps that stand for the start of a curve
WINDOW = 10  # steps in the mean that must reach a threshold


@dataclass(frozen=True)
class Measure:
    """`of` gives a run's number, or a Series of them by question.

    With `ratio`, arms are compared by quotient: the numbers are positive, and their logarithms are averaged. With
    `gpu`, runs on a CPU cannot speak. An `exact` number may have no chance in it: where all seeds agree, it is known.
    `scale` and `unit` are for readers: what a difference is multiplied by, and called.
    """

    name: str
    of: Callable[[Run], float | pd.Series]
    unit: str = ""
    scale: float = 1.0
    ratio: bool = False
    gpu: bool = False
    exact: bool = False

    def show(self, effect: float) -> str:
        """An effect, or a margin, as a reader sees it."""
        return f"×{math.exp(effect):.3f}" if self.ratio else f"{self.scale * effect:+.{2 if self.scale > 1 else 4}f}"

    def shown(self, effect: float) -> float:
        """An effect as a number of an axis: a difference in the unit, or in per cent for ratios."""
        return 100 * (math.exp(effect) - 1) if self.ratio else self.scale * effect

    def level(self, mean: float) -> str:
        """What one arm came to by itself."""
        return f"{math.exp(mean) if self.ratio else self.scale * mean:.4g}"

    def describe(self, mean: Mean) -> str:
        """Effect and interval; a single seed is called that, since its interval, if any, knows no other seed."""
        if mean.n == 1:
            return f"{self.show(mean.mean)} {self.unit}".strip() + " (a single seed)"
        if mean.identical:
            return f"{self.show(mean.mean)} {self.unit}".strip() + f" (the same in all {mean.n} repetitions)"
        return f"{self.show(mean.mean)} {self.between(mean.low, mean.high)} {self.unit}".strip()

    def between(self, low: float, high: float) -> str:
        """Two ends of an interval."""
        return f"[{self.show(low)}, {self.show(high)}]"

    def size(self, effect: float) -> str:
        """An effect without a direction, such as a margin or what can be detected."""
        if self.ratio:
            return f"{100 * (math.exp(effect) - 1):.1f} %"
        return f"{self.show(effect).removeprefix('+')} {self.unit}".strip()


def curve(run: Run, metric: str) -> pd.Series:
    """A training metric by step. Raises ConfigError if the run did not write it, or wrote no number."""
    values = run.series("train", metric)
    require(bool(values.notna().any()), f"{run.name} has no number of the metric {metric}")
    return values


def first(metric: str) -> Callable[[Run], float]:
    """The value at the first step: of the policy before any training."""
    return lambda run: float(curve(run, metric).dropna().iloc[0])


def area(metric: str) -> Callable[[Run], float]:
    """The mean height of the curve: two runs that start and end alike differ in it by how early they rise."""
    return lambda run: area_under_curve(*_arrays(curve(run, metric)))


def climb(metric: str) -> Callable[[Run], float]:
    """The mean height of the curve above its own start, the mean of the first steps."""
    return lambda run: area(metric)(run) - float(np.nanmean(curve(run, metric).iloc[:START]))


def late(metric: str) -> Callable[[Run], float]:
    """The mean over the last fifth of the steps."""
    return lambda run: float(np.nanmean(curve(run, metric).iloc[-max(1, round(LATE * len(curve(run, metric)))) :]))


def during(metric: str, start: float, end: float) -> Callable[[Run], float]:
    """The mean over the steps between two shares of the run, such as 0.1 to 0.2: the second tenth of them."""

    def of(run: Run) -> float:
        values = curve(run, metric)
        return float(np.nanmean(values.iloc[math.floor(start * len(values)) : max(1, math.floor(end * len(values)))]))

    return of


def typical(metric: str) -> Callable[[Run], float]:
    """The median over the steps that trained, those of the first tenth left out."""

    def of(run: Run) -> float:
        values = _trained(run, metric)
        warm = run.series("train", metric).index[: math.ceil(WARM_UP * len(run.series("train", metric)))]
        kept = values.drop(warm, errors="ignore")
        require(not kept.empty, f"{run.name} trained in no step after its first tenth")
        return float(kept.median())

    return of


def largest(metric: str) -> Callable[[Run], float]:
    """The maximum over the steps that trained."""
    return lambda run: float(_trained(run, metric).max())


def _trained(run: Run, metric: str) -> pd.Series:
    """Steps in which some completion had a gradient; speed and memory of others are no training's.

    Raises ConfigError for a run that has none, and for one that did not record which steps these are.
    """
    values, taught = curve(run, metric), run.series("train", TAUGHT)
    require(not taught.empty, f"{run.name} does not record {TAUGHT}, so its steps may not have trained anything")
    require(
        bool((taught > 0).any()),
        f"{run.name} trained nothing ({TAUGHT} is 0 in every step: all rewards of a group were equal)",
    )
    return values.loc[(taught.reindex(values.index) > 0).to_numpy()]


def held_out(mode: str) -> Callable[[Run], float | pd.Series]:
    """Share of right answers to each held-out question after training; to all, where a committed study kept no more.

    Raises ConfigError without that evaluation.
    """

    def of(run: Run) -> float | pd.Series:
        last = run.option("steps")
        if run.path.is_dir() or run.kept_answers is not None:
            answers = run.answers(mode)
            require(last in answers, f"{run.name} was not evaluated after its last step")
            return answers.loc[:, last]
        accuracy = run.series("eval", f"eval/accuracy_{mode}")
        require(last in accuracy.index, f"{run.name} was not evaluated after its last step")
        return float(accuracy.loc[last])

    return of


def difference(of: Callable[[Run], float]) -> Callable[[Run, Run], float]:
    return lambda run, control: of(run) - of(control)


def steps_saved(run: Run, control: Run) -> float:
    """Steps by which `run` reaches 90 % of the reward that `control` gains before `control` does; at most all of them.

    A run that never does counts as if it did after the last step, which makes a difference look smaller than it is.
    """
    gained = curve(control, "reward/mean").to_numpy()
    require(len(gained) >= WINDOW, f"{control.name} has {len(gained)} steps, steps saved need {WINDOW}: train longer")
    start, end = gained[:WINDOW].mean(), gained[-WINDOW:].mean()
    threshold = start + 0.9 * (end - start)
    reached = [steps_to_threshold(*_arrays(curve(one, "reward/mean")), threshold, WINDOW) for one in (run, control)]
    mine, theirs = (min(step, control.last_step + 1) for step in reached)
    return theirs - mine


def _arrays(series: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    return series.index.to_numpy(), series.to_numpy()
