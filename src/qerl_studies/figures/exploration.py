"""Does more entropy bring more right answers? Before training by weight format, after training by arm; and pass@k."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qerl_core.statistics import found_among, mean_ci
from qerl_studies.design.readings import pass_at
from qerl_studies.design.sessions import Sessions
from qerl_studies.effects.pairs import average_seeds, by_cell, of_units
from qerl_studies.figures.effects import PlottedArm
from qerl_studies.figures.paired import ENTROPY, SAMPLED
from qerl_studies.figures.style import (
    BAND,
    FULL_WIDTH,
    GRAY,
    caption,
    color,
    label_ends,
    panels,
    paper_style,
    percent,
)
from qerl_studies.runs.load import Run
from qerl_studies.runs.settings import describe_repeats

MARGIN = SAMPLED.on_axis(SAMPLED.margin)  # points of accuracy
Points = Sequence[tuple[float, float]]  # change of entropy in per cent, of accuracy in points, by base


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
                _scatter(ax, _before(study, reference, quant, k), quant.upper(), color(quant))
            _label(ax, f"base, pass@{k}", "entropy of the base, difference in %")
        for ax, k in zip(axes[-1], (1, arms[0].runs[0].option("eval.samples")), strict=True):
            for arm in arms:
                _scatter(ax, _after(arm, k), arm.label, arm.shade)
            _label(ax, f"after training, pass@{k}", "entropy over the run, difference in %")
        for left, right in axes:
            left.set_ylabel("difference, points")
            right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        before = f"Above: a base in 4 bits minus itself in {reference.upper()}, before training. Below: an arm"
        caption(
            figure,
            f"{before if formats else 'An arm'} minus its control, after training, the mean of its seeds. Dots: "
            f"{len(study.probes)} base models; diamonds: mean and 95% interval (Student's t). Grey: ±{MARGIN:g} point.",
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
                points = 100 * of_units([arm.runs, arm.control], pass_curve)
                means = [mean_ci(row) for row in points.to_numpy()]
                change.plot(points.index, [one.value for one in means], color=arm.shade, linewidth=1.0)
                band = np.array([[one.low, one.high] for one in means]).T
                change.fill_between(points.index.to_numpy(), *band, color=arm.shade, alpha=0.2, linewidth=0)
        change.axhspan(-MARGIN, MARGIN, color=BAND, linewidth=0, zorder=0)
        change.axhline(0, color=GRAY, linewidth=0.7, zorder=1)
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
            "one format; solid: after. Right: paired differences after training with 95% bands (Student's t). Grey: "
            f"±{MARGIN:g} point.",
        )
    return figure


def pass_curve(run: Run, step: int | None = None) -> pd.Series:
    """pass@k of the held-out questions for k = 1, 2, 4, ... at an evaluated step, the last if None; unbiased."""
    rows = run.answer_counts()
    assert rows is not None
    last = run.option("steps") if step is None else step
    chosen = rows[(rows["mode"] == "sampled") & (rows["step"] == last)]
    counts: list[int] = chosen["correct"].tolist()
    samples = max(chosen["samples"].tolist())
    sizes = [2**power for power in range(int(math.log2(samples)) + 1)]
    return pd.Series({k: fmean(found_among(k, samples, right) for right in counts) for k in sizes})


def _before(study: Sessions, reference: str, quant: str, k: int) -> Points:
    def entropy(probe: Mapping[str, Mapping[str, Mapping[str, float]]], name: str) -> float:
        return probe["formats"][name]["entropy"]

    return [
        (
            100 * (entropy(one, quant) / entropy(one, reference) - 1),
            100 * (pass_at(one, quant, k) - pass_at(one, reference, k)),
        )
        for one in study.probes.values()
    ]


def _after(arm: PlottedArm, k: int) -> Points:
    entropies = of_units([arm.runs, arm.control], ENTROPY.averaged).to_numpy()[0]
    accuracies = of_units([arm.runs, arm.control], pass_curve).loc[k].to_numpy()
    return [(ENTROPY.on_axis(x), 100 * y) for x, y in zip(entropies, accuracies, strict=True)]


def _scatter(ax: Axes, points: Points, label: str, shade: str) -> None:
    across, up = (mean_ci(values) for values in zip(*points, strict=True))
    ax.plot(*zip(*points, strict=True), ".", color=shade, alpha=0.4, markersize=3.5)
    ax.errorbar(
        across.value, up.value, fmt="D", color=shade, markersize=4.5, elinewidth=1.2, label=label,
        xerr=[[across.value - across.low], [across.high - across.value]],
        yerr=[[up.value - up.low], [up.high - up.value]],
    )  # fmt: skip


def _label(ax: Axes, title: str, across: str) -> None:
    ax.axhspan(-MARGIN, MARGIN, color=BAND, linewidth=0, zorder=0)
    ax.axhline(0, color=GRAY, linewidth=0.7, zorder=1)
    ax.axvline(0, color=GRAY, linewidth=0.7, zorder=1)
    ax.set_title(title)
    ax.set_xlabel(across)
