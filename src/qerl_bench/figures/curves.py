"""Learning curves as paired differences by step: an arm minus its control, with a 95 % band and the claim's margin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qerl_bench.checks import require
from qerl_bench.claims.measure import area
from qerl_bench.figures.effects import Line, line
from qerl_bench.figures.paired import ENTROPY as ENTROPY_MEAN
from qerl_bench.figures.paired import REWARD_MEAN, Column, by_cell, differences, effect, over_bases, repeated
from qerl_bench.figures.style import BAND, FULL_WIDTH, GREY, SMALL, caption, label_axes, label_ends, panels, paper_style
from qerl_bench.statistics import interval
from qerl_bench.study.load import Run
from qerl_bench.study.naming import format_rows, noise_of
from qerl_bench.study.select import arms


@dataclass(frozen=True)
class Curve:
    """A row of panels: a metric by step, and the one number that sums its differences up.

    Each step shows the mean of `smooth` steps around it or, `trailing`, of the last ones: what a stage of noise does is
    then never seen before the stage begins.
    """

    metric: str
    whole: Column
    smooth: int = 1
    trailing: bool = False

    def of(self, run: Run) -> pd.Series:
        values: Any = run.series("train", self.metric)
        means = values.rolling(self.smooth, min_periods=1, center=not self.trailing).mean().where(values.notna())
        return np.log(means) if self.whole.ratio else means


def paired_curves(shown: Sequence[Line], pairs: Sequence[Line], curves: Sequence[Curve], *notes: str) -> Figure:
    """A row per curve: the levels of the lines `shown`, then for each of `pairs` its difference to its control by step.

    Above each panel of a difference stands what it comes to over the whole run, with its interval.
    """
    with paper_style():
        figure, axes = panels(
            len(curves), 1 + len(pairs), 0.35 + 1.4 * len(curves), max(FULL_WIDTH, 1.5 + 1.2 * len(pairs)), sharex=True,
            width_ratios=[1.25] + [1.0] * len(pairs),
        )  # fmt: skip
        cut = False
        for row, curve in enumerate(curves):
            first, *others = axes[row]
            _levels(first, shown, curve)
            low, high = _limits(pairs, curve)
            for ax, one in zip(others, pairs, strict=True):
                cut |= _difference(ax, one, curve, low, high)
                name = [one.label] if row == 0 else []
                ax.set_title("\n".join([*name, *_whole(one, curve)]), fontsize=SMALL)
                if ax is not others[0]:
                    ax.set_yticklabels([])
            others[0].set_ylabel(f"difference{', %' if curve.whole.ratio else ''}")
        for ax in axes.flat:
            ax.xaxis.set_major_locator(MaxNLocator(nbins=3, integer=True, steps=[1, 2, 5, 10]))
        for ax in axes[:-1].flat:
            ax.set_xlabel("")
        caption(figure, *notes, *_notes(pairs, curves), "Bands that leave a panel are cut." if cut else "")
    return figure


def _whole(one: Line, curve: Curve) -> list[str]:
    """Effect and interval as text; nothing while runs have not got equally far."""
    together = len({run.last_step for run in (*one.runs, *one.control)}) == 1
    return curve.whole.text(effect(one.runs, one.control, curve.whole)[0]) if together else []


def _levels(ax: Axes, shown: Sequence[Line], curve: Curve) -> None:
    ends = []
    for one in shown:
        mean = over_bases(by_cell(one.runs, curve.of)).mean(axis=1)
        values = np.exp(mean.to_numpy()) if curve.whole.ratio else mean.to_numpy()
        ax.plot(mean.index, values, color=one.shade, linewidth=0.9, label=one.label)
        ends.append((float(values[-1]), one.label, one.shade))
    label_axes(ax, curve.metric)
    label_ends(ax, ends)


def _limits(pairs: Sequence[Line], curve: Curve) -> tuple[float, float]:
    """Of a row of panels: they hold the margin, all means, and their intervals where there are more than two units."""
    margin = curve.whole.margin
    values = [-1.3 * margin, 1.3 * margin]
    for one in pairs:
        points = differences(one.runs, one.control, curve.of)
        values += points.mean(axis=1).agg(["min", "max"]).tolist()
        if points.shape[1] > 2:
            bands = [interval(row) for row in points.to_numpy()]
            values += [float(np.quantile([band.low for band in bands], 0.02))]
            values += [float(np.quantile([band.high for band in bands], 0.98))]
    low, high = (curve.whole.shown(value) for value in (min(values), max(values)))
    return low - 0.05 * (high - low), high + 0.05 * (high - low)


def _difference(ax: Axes, one: Line, curve: Curve, low: float, high: float) -> bool:
    """Draw one panel; return whether its band leaves it."""
    shown = curve.whole.shown
    points = differences(one.runs, one.control, curve.of)
    means = [interval(row) for row in points.to_numpy()]
    ax.axhspan(shown(-curve.whole.margin), shown(curve.whole.margin), color=BAND, linewidth=0, zorder=0)
    ax.axhline(0, color=GREY, linewidth=0.7, zorder=1, label="_control")
    ax.plot(points.index, [shown(mean.mean) for mean in means], color=one.shade, linewidth=1.0, label=f"_{one.label}")
    cut = False
    if not any(math.isnan(mean.half) for mean in means):
        ends = np.array([[shown(mean.low), shown(mean.high)] for mean in means])
        ax.fill_between(points.index.to_numpy(), *ends.T, color=one.shade, alpha=0.2, linewidth=0, label="_band")
        cut = bool((ends[:, 0] < low).any() or (ends[:, 1] > high).any())
    ax.set_ylim(low, high)
    ax.set_xlabel("step")
    return cut


def _notes(pairs: Sequence[Line], curves: Sequence[Curve]) -> list[str]:
    runs = pairs[0].runs
    band = "95% band of each step (Student's t)" if len(runs) > 1 else "no band, since a single seed has none"
    smooth = []
    for curve in curves:
        window = (
            f"the mean of {'the last ' * curve.trailing}{curve.smooth} steps{'' if curve.trailing else ' around it'}"
        )
        smooth += [f"{curve.metric.split('/')[0]}: {window}"] if curve.smooth > 1 else []
    named = " and ".join(dict.fromkeys(curve.whole.label for curve in curves))
    margins = ", ".join(
        f"±{curve.whole.shown(curve.whole.margin):.2g}{'%' if curve.whole.ratio else ''} of {curve.whole.label}"
        for curve in curves
        if curve.whole.margin
    )
    return [
        f"Left: level (axis not from 0), mean of {repeated(runs)}. Others: paired difference by step, {band}.",
        f"Above each: difference of the {named} over the run, with 95% interval.",
        f"Grey: the margin within which that would not matter ({margins})." if margins else "",
        f"What a step shows of {', '.join(smooth)}." if smooth else "",
    ]


def format_curves(runs: Sequence[Run], curves: Sequence[Curve]) -> Figure:
    """Each format minus BF16 or, where that was not run, minus the first: `runs` differ in format alone."""
    rows = format_rows(arms(runs, ["quant.name", "aqn.name"]))
    first, *others = (line(row, row["label"], None if row is rows[0] else rows[0]) for row in rows)
    noise = "without noise" if rows[0]["aqn.name"] == "none" else f"with {noise_of(rows[0])}"
    pairs = [replace(one, label=f"{one.label} − {first.label}") for one in others]
    return paired_curves([first, *others], pairs, curves, f"Formats {noise}.")


def noise_curves(runs: Sequence[Run], curves: Sequence[Curve]) -> Figure:
    """Noise minus none within each format: `runs` are a design of formats x two kinds of noise, one of them none.

    Raises ConfigError with the missing runs if a format was not run with both.
    """
    rows = format_rows(arms(runs, [], crossed=["quant.name", "aqn.name"]))
    plain = [row for row in rows if row["aqn.name"] == "none"]
    noisy = [row for row in rows if row["aqn.name"] != "none"]
    require(
        len(plain) == len(noisy) > 0, "each format is needed once with noise and once with aqn=none: add these runs"
    )
    pairs = [line(row, row["label"], control) for row, control in zip(noisy, plain, strict=True)]
    shown = [line(row, row["label"], None) for row in plain]
    return paired_curves(shown, pairs, curves, f"{noise_of(noisy[0])} minus no noise; levels: without noise.")


REWARD = Curve("reward/mean", REWARD_MEAN, 11)
ENTROPY = Curve("entropy", ENTROPY_MEAN, 11, trailing=True)
CLEAN_MEAN = replace(ENTROPY_MEAN, label="mean entropy with noise off", of=area("entropy_clean"))
CLEAN = Curve("entropy_clean", CLEAN_MEAN, 11, trailing=True)
