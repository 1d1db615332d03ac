"""Does more entropy bring more right answers? Before training by weight format, after training by arm; and pass@k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import fmean

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qerl_core.statistics import Estimate, found_among, mean_ci
from qerl_studies.design.readings import pass_at
from qerl_studies.design.sessions import Sessions
from qerl_studies.effects.estimate import Effect, effect_of
from qerl_studies.effects.pairs import average_seeds, by_cell
from qerl_studies.figures.effects import PlottedArm
from qerl_studies.figures.paired import ENTROPY, SAMPLED, correlation_note
from qerl_studies.figures.style import (
    FULL_WIDTH,
    GRAY,
    caption,
    color,
    label_ends,
    margin_band,
    panels,
    paper_style,
    percent,
)
from qerl_studies.runs.load import Run
from qerl_studies.runs.settings import describe_repeats

MARGIN = SAMPLED.on_axis(SAMPLED.margin)  # points of accuracy
Numbers = tuple[np.ndarray, Estimate]  # by base, and over bases


def entropy_and_accuracy(study: Sessions, arms: Sequence[PlottedArm]) -> Figure:
    """The change of entropy against the change of accuracy, a dot per base, a diamond for the mean with its interval.

    Above, in a study of several formats: 4 bits before any training, at one sample and at as many as the probe drew.
    Below: `arms` minus their controls after training, at one sample and at as many as the evaluation drew.
    """
    reference, *formats = study.formats
    most = study.design.probe.samples
    with paper_style():
        rows = 2 if formats else 1
        figure, axes = panels(rows, 2, 2.3 * rows, FULL_WIDTH, sharex="row")
        for ax, k in zip(axes[0], (1, most), strict=True) if formats else ():
            for quant in formats:
                _before(ax, study, reference, quant, k)
            _label(ax, f"base, pass@{k}", "entropy of the base, difference in %")
        for ax, k in zip(axes[-1], (1, arms[0].runs[0].option("eval.samples")), strict=True):
            for arm in arms:
                _after(ax, arm, k)
            _label(ax, f"after training, pass@{k}", "entropy over the run, difference in %")
        for left, right in axes:
            left.set_ylabel("difference, points")
            right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        before = f"Above: a base in 4 bits minus itself in {reference.upper()}, before training. Below: an arm"
        caption(
            figure,
            f"{before if formats else 'An arm'} minus its control, after training, the mean of its seeds. Dots: "
            f"{len(study.probes)} base models; diamonds: mean and 95% interval (Student's t; questions "
            f"{'fixed above, drawn below' if formats else 'drawn'}). Grey: ±{MARGIN:g} point.",
            correlation_note(passing(arm, 1) for arm in arms),
        )
    return figure


def pass_at_k_curves(arms: Sequence[PlottedArm]) -> Figure:
    """pass@k on held-out questions before and after training, and the difference of each arm to its control."""
    with paper_style():
        figure, ((levels, change),) = panels(1, 2, 2.3, FULL_WIDTH)
        ends = []
        for arm in arms:
            before, after = (
                average_seeds(by_cell(arm.runs, curve)) for curve in (partial(pass_curve, step=0), pass_curve)
            )
            levels.plot(after.index, after.mean(axis=1), color=arm.shade, linewidth=1.0)
            levels.plot(before.index, before.mean(axis=1), color=arm.shade, linewidth=1.0, linestyle="dashed", zorder=1)
            ends.append((float(after.iloc[-1].mean()), arm.label, arm.shade))
            if arm.control:
                shared = after.index.intersection(pass_curve(arm.control[0]).index)
                means = [passing(arm, k).whole for k in shared]
                change.plot(shared, [100 * one.value for one in means], color=arm.shade, linewidth=1.0)
                band = np.array([[100 * one.low, 100 * one.high] for one in means]).T
                change.fill_between(shared.to_numpy(), *band, color=arm.shade, alpha=0.2, linewidth=0)
        margin_band(change, -MARGIN, MARGIN, "y")
        for ax, title in ((levels, "pass@k"), (change, "minus the control, points")):
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter("{x:g}")
            ax.set_xlabel("k")
            ax.set_title(title)
        levels.yaxis.set_major_formatter(percent)
        label_ends(levels, ends)
        caption(
            figure,
            f"Held-out questions, mean of {describe_repeats(arms[0].runs)}. Dashed: before training, equal for arms of "
            "one format; solid: after. Right: paired differences after training with 95% bands (Student's t, questions "
            "drawn). Grey: "
            f"±{MARGIN:g} point.",
        )
    return figure


def passed(run: Run, k: int, step: int | None = None) -> pd.Series:
    """pass@k of each held-out question at an evaluated step, the last if None; unbiased."""
    chosen = _sampled(run, step)
    samples = max(chosen["samples"].tolist())
    found = [found_among(k, samples, right) for right in chosen["correct"].tolist()]
    return pd.Series(found, index=chosen["question"])


def pass_curve(run: Run, step: int | None = None) -> pd.Series:
    """pass@k of the held-out questions for k = 1, 2, 4, ... at an evaluated step, the last if None."""
    samples = max(_sampled(run, step)["samples"].tolist())
    sizes = [2**power for power in range(int(math.log2(samples)) + 1)]
    return pd.Series({k: fmean(passed(run, k, step)) for k in sizes})


def _sampled(run: Run, step: int | None) -> pd.DataFrame:
    rows = run.answer_counts()
    assert rows is not None
    last = run.option("steps") if step is None else step
    chosen = rows[(rows["mode"] == "sampled") & (rows["step"] == last)]
    assert isinstance(chosen, pd.DataFrame)
    return chosen


def passing(arm: PlottedArm, k: int) -> Effect:
    """On pass@k."""
    return effect_of([arm.runs, arm.control], partial(passed, k=k))


def _before(ax: Axes, study: Sessions, reference: str, quant: str, k: int) -> None:
    """Of the probes of bases, whose questions are fixed, as in gates.md."""
    pairs = [[one["formats"][name]["entropy"] for name in (quant, reference)] for one in study.probes.values()]
    entropies = np.array([math.log(treated / plain) for treated, plain in pairs])
    right = np.array([pass_at(one, quant, k) - pass_at(one, reference, k) for one in study.probes.values()])
    _scatter(ax, (entropies, mean_ci(entropies)), (right, mean_ci(right)), quant.upper(), color(quant))


def _after(ax: Axes, arm: PlottedArm, k: int) -> None:
    entropies, right = effect_of([arm.runs, arm.control], ENTROPY.averaged), passing(arm, k)
    _scatter(ax, (entropies.by_unit, entropies.whole), (right.by_unit, right.whole), arm.label, arm.shade)


def _scatter(ax: Axes, entropies: Numbers, right: Numbers, label: str, shade: str) -> None:
    """Logarithms of ratios and differences of shares: single bases, their mean with its interval."""
    ax.plot([ENTROPY.on_axis(x) for x in entropies[0]], 100 * right[0], ".", color=shade, alpha=0.4, markersize=3.5)
    x, left, end = ENTROPY.ends_on_axis(entropies[1])
    y, low, high = SAMPLED.ends_on_axis(right[1])
    ax.errorbar(
        x, y, fmt="D", color=shade, markersize=4.5, elinewidth=1.2, label=label, xerr=[[x - left], [end - x]],
        yerr=[[y - low], [high - y]],
    )  # fmt: skip


def _label(ax: Axes, title: str, across: str) -> None:
    margin_band(ax, -MARGIN, MARGIN, "y")
    ax.axvline(0, color=GRAY, linewidth=0.7, zorder=1)
    ax.set_title(title)
    ax.set_xlabel(across)
