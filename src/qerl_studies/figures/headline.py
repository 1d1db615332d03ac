"""The numbers that one looks at first: held-out accuracy, strict and lenient, reward and entropy.

Of an arm, of two arms in pairs, and of an arm by step. An arm is its runs by base and seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from qerl_core.checks import ConfigError
from qerl_core.statistics import Estimate, mean_ci, mean_ci_crossed
from qerl_studies.claims.measures import ACCURACY, REWARD
from qerl_studies.figures.paired import average_seeds, by_cell
from qerl_studies.runs.load import Cell, Run
from qerl_studies.runs.measure import last_fifth_mean

Arm = Mapping[Cell, Run]
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
    return float(average_seeds(by_cell(runs, value)).to_numpy().mean()) if runs else math.nan


def paired(first: Arm, second: Arm, common: Sequence[Cell], kind: str, name: str) -> Estimate | None:
    """The difference within base and seed; None without a pair that has the number."""
    if len(common) == 1 and name.startswith("eval/accuracy_"):
        over_questions = _by_question(first[common[0]], second[common[0]], name.removeprefix("eval/accuracy_"))
        if over_questions is not None:
            return over_questions
    gaps = {cell: value_of(first[cell], kind, name) - value_of(second[cell], kind, name) for cell in common}
    known = {cell: gap for cell, gap in gaps.items() if math.isfinite(gap)}
    if not known:
        return None
    table = pd.DataFrame([known.values()], columns=pd.MultiIndex.from_tuples(known, names=["base", "seed"]))
    return mean_ci(average_seeds(table).to_numpy()[0])


def _by_question(first: Run, second: Run, mode: str) -> Estimate | None:
    """The difference of one pair of runs with an interval over questions; None if answers to the same were not kept."""
    try:
        answers = [run.answers(mode).iloc[:, -1] for run in (first, second)]
    except ConfigError:
        return None
    gaps = (answers[0] - answers[1]).dropna()
    return mean_ci_crossed(np.asarray(gaps)) if len(gaps) == len(answers[0]) == len(answers[1]) > 1 else None


def in_a_word(difference: Estimate, margin: float) -> str:
    """What the interval of a difference leaves; not adjusted for how many differences one looks at."""
    if not difference.stderr > 0:
        return "no interval"
    if margin and -margin < difference.low and difference.high < margin:
        return "within the margin"
    if difference.low > 0 or difference.high < 0:
        return "higher" if difference.low > 0 else "lower"
    return "open"


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
