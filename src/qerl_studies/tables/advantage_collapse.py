"""Whether runs that begin with many groups without signal end lower, for `qerl-bench figure advantage_collapse`.

Such groups have advantages of zero, and arXiv 2605.21125 predicts the final accuracy from their share in the first
steps. Settings and bases differ in that share for reasons of their own (a larger group has a signal more often), so the
slope over runs is taken within both: accuracy = setting + base + slope x share, least squares.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
import pandas as pd

from qerl_core.checks import require
from qerl_core.statistics import Estimate
from qerl_studies.effects.estimate import slope
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import final_accuracy, mean_between, training_curve
from qerl_studies.runs.settings import group_by_setting
from qerl_studies.tables.paper import Table

NO_SIGNAL, EARLY = "reward/frac_zero_std", 0.1  # share of a run's steps
SHARE = mean_between(NO_SIGNAL, 0, EARLY)
ACCURACY = final_accuracy("sampled")
WITHIN = "within settings and bases"


def advantage_collapse(runs: Sequence[Run]) -> Table:
    """A row for each setting, and the slope over all runs within settings and bases, with its 95 % interval.

    Of finished runs that sampled and were evaluated. Raises ConfigError if there are too few for a slope.
    """
    chosen = [run for run in runs if run.finished and not run.series("train", NO_SIGNAL).empty]
    chosen = [run for run in chosen if not run.series("eval", "eval/accuracy_sampled").empty]
    rows: list[dict[str, object]] = []
    for setting in group_by_setting(chosen):
        shares, trends, ends = (np.array([metric(run) for run in setting.runs]) for metric in (SHARE, trend, ACCURACY))
        means = {"share": shares.mean(), "trend": trends.mean(), "accuracy": ends.mean()}
        rows.append({"setting": setting.name, "runs": len(shares), **means})
    slope = slope_within(
        [SHARE(run) for run in chosen],
        [ACCURACY(run) for run in chosen],
        [[run.setting_items for run in chosen], [run.base for run in chosen]],
    )
    bounds = {"slope": slope.value, "low": slope.low, "high": slope.high}
    rows.append({"setting": WITHIN, "runs": slope.n, **bounds})
    numbers = pd.DataFrame(rows, columns=["setting", "runs", "share", "trend", "accuracy", "slope", "low", "high"])
    shown = pd.DataFrame({"setting": numbers["setting"], "runs": numbers["runs"]})
    for name, key, scale in (("share", "share", 1), ("per step", "trend", 1), ("accuracy (%)", "accuracy", 100)):
        shown[name] = ["" if math.isnan(value) else f"{scale * value:.3g}" for value in numbers[key].astype(float)]
    value, low, high = (100 * one for one in bounds.values())
    shown["points per unit share"] = [""] * (len(rows) - 1) + [f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"]
    caption = (
        "Share of groups without signal over the first tenth of the steps, its trend there, and held-out accuracy "
        "after training. Last row: the slope of accuracy over that share, within settings and bases, and its interval "
        "of 95 %."
    )
    return Table("advantage_collapse", numbers, shown, caption)


def trend(run: Run) -> float:
    """The least-squares slope by step of the share over the first tenth; NaN of fewer than two steps."""
    values = training_curve(run, NO_SIGNAL)
    early = values.iloc[: math.floor(EARLY * len(values))].dropna()
    return float(np.polyfit(early.index.to_numpy(), early.to_numpy(), 1)[0]) if len(early) > 1 else math.nan


def slope_within(x: Sequence[float], y: Sequence[float], groups: Sequence[Sequence[Hashable]]) -> Estimate:
    """`slope`. Raises ConfigError if `x` differs within no group, or no degree of freedom is left for an error."""
    found = slope(x, y, groups)
    require(
        found.has_interval,
        f"a slope within settings and bases needs more runs of equal settings that differ in their groups without "
        f"signal, got {len(x)} with {NO_SIGNAL} and an evaluation: add seeds or bases",
    )
    return found
