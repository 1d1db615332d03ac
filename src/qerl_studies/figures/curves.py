"""Learning curves as paired differences by step: an arm minus its control, with a 95 % band and the margin of the
claim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qerl_core.checks import require
from qerl_core.statistics import Estimate, mean_ci
from qerl_studies.effects.estimate import Effect
from qerl_studies.effects.pairs import average_seeds, by_cell, difference_by_step
from qerl_studies.figures.effects import PlottedArm, plotted_arm
from qerl_studies.figures.labels import label_settings, noise_text
from qerl_studies.figures.paired import ENTROPY as ENTROPY_MEAN
from qerl_studies.figures.paired import REWARD_MEAN, correlation_note, effect, effect_text
from qerl_studies.figures.style import (
    FULL_WIDTH,
    caption,
    label_axes,
    label_ends,
    margin_band,
    panels,
    paper_style,
    small,
)
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import Measure, area
from qerl_studies.runs.settings import Study, describe_repeats

ByStep = dict[int, Estimate]


@dataclass(frozen=True)
class Curve:
    """A row of panels: a metric by step, and the one number of a run that summarizes it.

    Each step shows the mean of `smooth` steps around it or, if `trailing`, of the last ones, so that the effect of a
    stage of noise never shows before the stage begins.
    """

    metric: str
    summary: Measure
    smooth: int = 1
    trailing: bool = False

    def of_run(self, run: Run) -> pd.Series:
        values: Any = run.series("train", self.metric)
        means = values.rolling(self.smooth, min_periods=1, center=not self.trailing).mean().where(values.notna())
        return np.log(means) if self.summary.ratio else means


def paired_curves(
    shown: Sequence[PlottedArm], pairs: Sequence[PlottedArm], curves: Sequence[Curve], *notes: str
) -> Figure:
    """A row per curve: the means of the arms `shown`, then for each of `pairs` its difference to its control by step.

    Above each difference is its value for the whole run, with its interval. Short runs are smoothed less.
    """
    steps = max(run.last_step for arm in shown for run in arm.runs)
    curves = [replace(curve, smooth=min(curve.smooth, steps // 20 * 2 + 1)) for curve in curves]
    with paper_style():
        figure, axes = panels(
            len(curves), 1 + len(pairs), 0.35 + 1.4 * len(curves), max(FULL_WIDTH, 1.5 + 1.2 * len(pairs)), sharex=True,
            width_ratios=[1.25] + [1.0] * len(pairs),
        )  # fmt: skip
        cut = False
        narrow = figure.get_figwidth() / small() < 0.15 * (2 + len(pairs))  # a panel is narrower than its interval
        for row, curve in enumerate(curves):
            first, *others = axes[row]
            _levels(first, shown, curve)
            differences = [_by_step(one, curve) for one in pairs]
            low, high = _limits(differences, curve)
            for ax, one, means in zip(others, pairs, differences, strict=True):
                cut |= _difference(ax, means, one, curve, low, high)
                name = [one.label.replace(" − ", "\n− ") if len(pairs) > 4 else one.label] if row == 0 else []
                whole = [line.replace(", ", ",\n ") if narrow else line for line in _whole(one, curve)]
                ax.set_title("\n".join([*name, *whole]), fontsize=small())
                if ax is not others[0]:
                    ax.set_yticklabels([])
            others[0].set_ylabel(f"difference{', %' if curve.summary.ratio else ''}")
        for ax in axes.flat:
            ax.xaxis.set_major_locator(MaxNLocator(nbins=3, integer=True, steps=[1, 2, 5, 10]))
        for ax in axes[:-1].flat:
            ax.set_xlabel("")
        caption(figure, *notes, *_notes(pairs, curves), "Bands that leave a panel are cut." if cut else "")
    return figure


def _whole(one: PlottedArm, curve: Curve) -> list[str]:
    """Effect and interval as text; nothing if some runs have more steps than others."""
    same_length = len({run.last_step for run in (*one.runs, *one.control)}) == 1
    return effect_text(curve.summary, _effect(one, curve).whole) if same_length else []


def _effect(one: PlottedArm, curve: Curve) -> Effect:
    return effect(one.runs, one.control, curve.summary)


def _levels(ax: Axes, shown: Sequence[PlottedArm], curve: Curve) -> None:
    ends = []
    for one in shown:
        mean = average_seeds(by_cell(one.runs, curve.of_run)).mean(axis=1)
        values = np.exp(mean.to_numpy()) if curve.summary.ratio else mean.to_numpy()
        ax.plot(mean.index, values, color=one.shade, linewidth=0.9, label=one.label)
        ends.append((float(values[-1]), one.label, one.shade))
    label_axes(ax, curve.metric)
    label_ends(ax, ends)


def _by_step(one: PlottedArm, curve: Curve) -> ByStep:
    table = difference_by_step(one.runs, one.control, curve.of_run)
    return {step: mean_ci(row) for step, row in zip(table.index, table.to_numpy(), strict=True)}


def _limits(differences: Sequence[ByStep], curve: Curve) -> tuple[float, float]:
    """The limits of a row of panels: the margin, all means, and their intervals if there are more than two units."""
    values = [-1.3 * curve.summary.margin, 1.3 * curve.summary.margin]
    for means in map(list, map(dict.values, differences)):
        values += [one.value for one in means]
        if means[0].n > 2:
            values += [float(np.quantile([one.low for one in means], 0.02))]
            values += [float(np.quantile([one.high for one in means], 0.98))]
    low, high = (curve.summary.on_axis(value) for value in (min(values), max(values)))
    return low - 0.05 * (high - low), high + 0.05 * (high - low)


def _difference(ax: Axes, means: ByStep, one: PlottedArm, curve: Curve, low: float, high: float) -> bool:
    """Draw one panel; return whether its band is cut off."""
    ends = np.array([curve.summary.ends_on_axis(mean) for mean in means.values()])
    margin_band(ax, *curve.summary.band, "y")
    ax.plot([*means], ends[:, 0], color=one.shade, linewidth=1.0, label=f"_{one.label}")
    cut = False
    if not np.isnan(ends).any():
        ax.fill_between([*means], ends[:, 1], ends[:, 2], color=one.shade, alpha=0.2, linewidth=0, label="_band")
        cut = bool((ends[:, 1] < low).any() or (ends[:, 2] > high).any())
    ax.set_ylim(low, high)
    ax.set_xlabel("step")
    return cut


def _notes(pairs: Sequence[PlottedArm], curves: Sequence[Curve]) -> list[str]:
    runs = pairs[0].runs
    band = "95% band of each step (Student's t)" if len(runs) > 1 else "no band, since a single seed has none"
    smooth = []
    for curve in curves:
        window = (
            f"the mean of {'the last ' * curve.trailing}{curve.smooth} steps{'' if curve.trailing else ' around it'}"
        )
        smooth += [f"{curve.metric.split('/')[0]}: {window}"] if curve.smooth > 1 else []
    named = " and ".join(dict.fromkeys(curve.summary.name for curve in curves))
    margins = ", ".join(
        f"±{one.on_axis(one.margin):.2g}{'%' if one.ratio else ''} of {one.name}"
        for one in (curve.summary for curve in curves)
        if one.margin
    )
    return [
        f"Left: level (axis not from 0), mean of {describe_repeats(runs)}. Others: paired difference by step, {band}.",
        f"Above each: difference of the {named} over the run, with 95% interval.",
        correlation_note(_effect(pair, one) for pair in pairs for one in curves),
        f"Grey: the margin within which that would not matter ({margins})." if margins else "",
        f"What a step shows of {', '.join(smooth)}." if smooth else "",
    ]


def format_curves(study: Study, curves: Sequence[Curve]) -> Figure:
    """Each format minus BF16 or, without it, minus the first; the runs differ in format alone."""
    settings = label_settings(study.complete_settings())
    control = settings[0]
    arms = [plotted_arm(one, one.label, None if one is control else control) for one in settings]
    noise = "without noise" if control["aqn.name"] == "none" else f"with {noise_text(control)}"
    pairs = [replace(arm, label=f"{arm.label} − {control.label}") for arm in arms[1:]]
    return paired_curves(arms, pairs, curves, f"Formats {noise}.")


def noise_curves(study: Study, curves: Sequence[Curve]) -> Figure:
    """Noise minus none within each format; the runs cross formats with one noise schedule and none.

    Raises ConfigError with the missing runs if a format was not run with both.
    """
    settings = label_settings(study.complete_settings("quant.name", "aqn.name"))
    plain = [one for one in settings if one["aqn.name"] == "none"]
    noisy = [one for one in settings if one["aqn.name"] != "none"]
    require(
        len(plain) == len(noisy) > 0, "each format is needed once with noise and once with aqn=none: add these runs"
    )
    pairs = [plotted_arm(one, one.label, control) for one, control in zip(noisy, plain, strict=True)]
    shown = [plotted_arm(one, one.label, None) for one in plain]
    return paired_curves(shown, pairs, curves, f"{noise_text(noisy[0])} minus no noise; levels: without noise.")


REWARD = Curve("reward/mean", REWARD_MEAN, 11)
ENTROPY = Curve("entropy", ENTROPY_MEAN, 11, trailing=True)
CLEAN_MEAN = replace(ENTROPY_MEAN, name="mean entropy with noise off", metric=area("entropy_clean"))
CLEAN = Curve("entropy_clean", CLEAN_MEAN, 11, trailing=True)
