"""The numbers that one looks at first: held-out accuracy, strict and lenient, reward and entropy.

Of an arm, of two arms in pairs, and of an arm by step. An arm is its runs by base and seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from qerl_core.checks import ConfigError
from qerl_core.statistics import Estimate, mean_ci
from qerl_studies.claims.measures import ACCURACY, REWARD
from qerl_studies.effects.estimate import Questions, over_units
from qerl_studies.effects.pairs import average_seeds, by_cell, mean_of_runs, of_units
from qerl_studies.runs.load import Cell, Run
from qerl_studies.runs.measure import last_fifth_mean

Arm = Mapping[Cell, Run]
COLUMNS = {"accuracy": "correct", "lenient": "lenient"}  # of answers, by what evaluations call their means
POINTS = 100  # of a curve; longer ones show means of equal stretches of steps


@dataclass(frozen=True)
class Headline:
    """A metric, what it is called, how it is shown, and the smallest difference that matters; 0 if none was named."""

    title: str
    kind: str  # train: the mean over the last fifth of the steps | eval: the last evaluation
    metric: str
    form: str
    margin: float = 0.0


HEADLINES = (
    Headline("held-out accuracy, greedy", "eval", "eval/accuracy_greedy", ".1%", ACCURACY.margin),
    Headline("held-out accuracy, sampled", "eval", "eval/accuracy_sampled", ".1%", ACCURACY.margin),
    Headline("lenient, greedy", "eval", "eval/lenient_greedy", ".1%", ACCURACY.margin),
    Headline("lenient, sampled", "eval", "eval/lenient_sampled", ".1%", ACCURACY.margin),
    Headline("reward", "train", "reward/mean", ".3f", REWARD.margin),
    Headline("entropy", "train", "entropy", ".3f"),
)


def value_of(run: Run, kind: str, name: str) -> float:
    """A number of a run; NaN if it has none."""
    series = run.series(kind, name).dropna()
    if series.empty:
        return math.nan
    return last_fifth_mean(name)(run) if kind == "train" else float(series.iloc[-1])


def mean_of(arm: Arm, value: Callable[[Run], float]) -> float:
    """The mean over bases, or over the seeds of one; the runs without the number are left out."""
    runs = [run for run in arm.values() if math.isfinite(value(run))]
    return mean_of_runs(runs, value) if runs else math.nan


def paired(
    first: Arm, second: Arm, common: Sequence[Cell], kind: str, name: str, questions: Questions = "drawn"
) -> Estimate | None:
    """The difference within base and seed; None without a pair that has the number.

    With `questions` drawn the interval of an accuracy holds for others too, where all kept their answers to the same.
    """
    value = partial(value_of, kind=kind, name=name)
    known = [cell for cell in common if all(math.isfinite(value(arm[cell])) for arm in (first, second))]
    arms = [{cell: arm[cell] for cell in known} for arm in (first, second)]
    if not known:
        return None
    by_question = _by_question(arms, name) if questions == "drawn" else None
    return by_question or over_units(of_units(arms, value, any_machine=True).to_numpy(), "fixed")


def _by_question(arms: Sequence[Arm], name: str) -> Estimate | None:
    """The difference with an interval for other questions too; None if answers to the same were not kept."""
    what, _, mode = name.removeprefix("eval/").partition("_")
    if what not in COLUMNS:
        return None
    try:
        gaps = of_units(arms, lambda run: run.answers(mode, COLUMNS[what]).iloc[:, -1], any_machine=True).dropna()
    except ConfigError:
        return None
    return over_units(gaps.to_numpy(), "drawn") if len(gaps) > 1 else None


def by_step(runs: Sequence[Run], kind: str, metric: str) -> list[tuple[float, Estimate]]:
    """Step and mean over bases, or over the seeds of one, at the steps that all runs have; empty if none has it.

    Of more than POINTS steps, means of equal stretches, at their middle.
    """
    known = [run for run in runs if not run.series(kind, metric).dropna().empty]
    if not known:
        return []
    table = average_seeds(by_cell(known, lambda run: run.series(kind, metric))).sort_index()
    stretches = np.array_split(np.arange(len(table)), min(len(table), POINTS)) if len(table) else []
    steps, values = table.index.to_numpy(), table.to_numpy()
    means = [(float(np.mean(steps[part])), np.nanmean(values[part], axis=0)) for part in stretches]
    return [(step, mean_ci(each)) for step, each in means if np.isfinite(each).all()]
