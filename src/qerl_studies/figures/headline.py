"""The numbers that one looks at first: held-out accuracy, strict and lenient, reward and entropy.

Of an arm, of two arms in pairs, and of an arm by step. An arm is its runs by base and seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qerl_core.checks import ConfigError
from qerl_core.statistics import Estimate, mean_ci
from qerl_studies.claims.measures import ACCURACY, REWARD
from qerl_studies.effects.estimate import Effect, effect_of
from qerl_studies.effects.pairs import average_seeds, by_cell, mean_of_runs, paired
from qerl_studies.effects.state import State, of_interval
from qerl_studies.runs.load import Cell, Run
from qerl_studies.runs.measure import mean_of_last_fifth

Arm = Mapping[Cell, Run]
COLUMNS = {"accuracy": "correct", "lenient": "lenient"}  # of answers, by what evaluations call their means
POINTS = 100  # of a curve; longer ones show means of equal stretches of steps


@dataclass(frozen=True)
class Headline:
    """A metric, what it is called, how it is shown, and the smallest difference that matters; 0 if none was named."""

    title: str
    kind: str  # train: the mean over the last fifth of the steps | eval: the last evaluation
    metric: str
    form: str = ".4g"
    margin: float = 0.0

    def of(self, run: Run) -> float:
        """The number of a run; NaN if it has none."""
        values = run.numbers(self.kind, self.metric)
        known = values[~np.isnan(values)]
        if not len(known):
            return math.nan
        return mean_of_last_fifth(values) if self.kind == "train" else float(known[-1])

    def mean(self, arm: Arm) -> float:
        """Over bases, or over the seeds of one; the runs without the number are left out, NaN if all are."""
        runs = [run for run in arm.values() if math.isfinite(self.of(run))]
        return mean_of_runs(runs, self.of) if runs else math.nan

    def text(self, mean: float) -> str:
        return f"{mean:{self.form}}" if math.isfinite(mean) else "-"


SAMPLED = Headline("held-out accuracy, sampled", "eval", "eval/accuracy_sampled", ".1%", ACCURACY.margin)
HEADLINES = (
    Headline("held-out accuracy, greedy", "eval", "eval/accuracy_greedy", ".1%", ACCURACY.margin),
    SAMPLED,
    Headline("lenient, greedy", "eval", "eval/lenient_greedy", ".1%", ACCURACY.margin),
    Headline("lenient, sampled", "eval", "eval/lenient_sampled", ".1%", ACCURACY.margin),
    Headline("reward", "train", "reward/mean", ".3f", REWARD.margin),
    Headline("entropy", "train", "entropy", ".3f"),
)
OF_TRAINING = tuple(one for one in HEADLINES if one.kind == "train")


def headlines_of(
    written: set[tuple[str, str]], order: Callable[[tuple[str, str]], Any] | None = None
) -> list[Headline]:
    """Of the kinds and names that runs wrote: those of HEADLINES, and behind them the others, by name or in `order`."""
    leading = [one for one in HEADLINES if (one.kind, one.metric) in written]
    rest = sorted(written - {(one.kind, one.metric) for one in leading}, key=order)
    return [*leading, *(Headline(name, kind, name) for kind, name in rest)]


def written_by(runs: Sequence[Run]) -> set[tuple[str, str]]:
    """Kind and name of each number that any of the runs wrote."""
    return {pair for run in runs for pair in run.written}


@dataclass(frozen=True)
class Compared:
    """A number of two arms: the mean of each, NaN for what an arm has not, and the effect in pairs, if it has any."""

    number: Headline
    means: tuple[float, ...]
    effect: Effect | None
    why_not: str = ""  # nothing could be tested

    @property
    def difference(self) -> Estimate | None:
        """The first minus the second."""
        return self.effect.whole if self.effect else None

    @property
    def correlation(self) -> float:
        """Of the two arms over units."""
        return self.effect.correlation if self.effect else math.nan

    @property
    def texts(self) -> tuple[str, str, str, str, str]:
        """The mean of each arm, the difference, its interval and the correlation."""
        first, second = (f"{mean:.4g}" if math.isfinite(mean) else "-" for mean in self.means)
        together = f"{self.correlation:+.2f}" if math.isfinite(self.correlation) else "-"
        if self.difference is None:
            return first, second, "-", "-", together
        interval = self.difference.interval_text("{:+.4g}".format)
        return first, second, f"{self.difference.value:+.4g}", interval, together

    @property
    def state(self) -> State:
        if self.difference is None or self.why_not:
            return State(untested=self.why_not or "no pair")
        return of_interval(self.difference, self.number.margin)


def common_cells(first: Arm, second: Arm) -> list[Cell]:
    return sorted(first.keys() & second.keys())


def compared(first: Arm, second: Arm, number: Headline) -> Compared:
    """Pairs are runs of one base and seed that have the number, on whatever machines."""
    return Compared(number, (number.mean(first), number.mean(second)), effect_on(first, second, number))


def effect_on(first: Arm, second: Arm, number: Headline) -> Effect | None:
    """Of accuracies by question, where all kept their answers to the same."""
    common, arms = common_cells(first, second), (first, second)
    known = [cell for cell in common if all(math.isfinite(number.of(arm[cell])) for arm in arms)]
    arms = [{cell: arm[cell] for cell in known} for arm in arms]
    if not known:
        return None
    return _by_question(arms, number.metric) or effect_of(arms, number.of, any_machine=True)


def _by_question(arms: Sequence[Arm], name: str) -> Effect | None:
    what, _, mode = name.removeprefix("eval/").partition("_")
    if what not in COLUMNS:
        return None
    try:
        tables = paired(arms, lambda run: run.answers(mode, COLUMNS[what]).iloc[:, -1], any_machine=True)
    except ConfigError:
        return None
    answered = np.all([table.notna().all(axis=1) for table in tables], axis=0)
    return Effect(tuple(table.loc[answered] for table in tables)) if answered.sum() > 1 else None


def by_step(runs: Sequence[Run], number: Headline) -> list[tuple[float, Estimate]]:
    """Step and mean over bases, or over the seeds of one, at the steps that all runs have; empty if none has it.

    Of more than POINTS steps, means of equal stretches, at their middle.
    """
    known = [run for run in runs if not run.series(number.kind, number.metric).dropna().empty]
    if not known:
        return []
    table = average_seeds(by_cell(known, lambda run: run.series(number.kind, number.metric))).sort_index()
    stretches = np.array_split(np.arange(len(table)), min(len(table), POINTS)) if len(table) else []
    steps, values = table.index.to_numpy(), table.to_numpy()
    means = [(float(np.mean(steps[part])), np.nanmean(values[part], axis=0)) for part in stretches]
    return [(step, mean_ci(each)) for step, each in means if np.isfinite(each).all()]
