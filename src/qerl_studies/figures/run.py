"""A first look at runs: one metric by step for several runs, and the figures of a single run.

Functions that return a figure leave saving to the caller. Comparisons of arms are paired differences: by step in
curves.py, as one number per run in effects.py.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from qerl_core.checks import require
from qerl_core.statistics import mean_ci
from qerl_studies.effects.pairs import average_seeds, by_cell
from qerl_studies.figures.labels import label_settings, sigma_by_step
from qerl_studies.figures.style import (
    OTHER_COLORS,
    TITLES,
    color,
    label_axes,
    legend_above,
    line_style,
    panels,
    paper_style,
    save,
)
from qerl_studies.runs.load import Run, load_run
from qerl_studies.runs.settings import Setting, Study, describe_repeats, steps_around, unit_count

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # of settings with one color and dash
HELD_OUT = {"greedy": "o", "sampled": "s"}  # decoding of the held-out questions -> marker
LENIENT = {"greedy": "+", "sampled": "x"}  # the same by the last number, whatever the format of the answer


# --- several runs ----------------------------------------------------------------------------------------------------


def comparison(study: Study, metrics: Sequence[str], smooth: int = 1, share_y: bool = False) -> Figure:
    """One panel per metric, and a line per setting.

    A color is a format, or a setting where format and noise do not tell all apart. `smooth` is the odd number of steps
    in the mean around each, at most a fifth of the run. Of three or more seeds a band is the 95 % interval of the mean,
    over the steps that all have; of two, whose interval is wide, each is a thin line. A non-finite value leaves a gap.
    Raises ConfigError if no run has the metric, or if a setting has two runs of a seed.
    """
    require(bool(study.runs), "no finished run to draw: pass folders that hold some")
    require(smooth >= 1 and smooth % 2 == 1, f"smooth counts steps and must be odd and at least 1, got {smooth}")
    settings, smooth = _labelled(study), steps_around(study.runs, smooth)
    longest = max((setting.runs for setting in settings), key=len)
    with paper_style():
        figure, axes = panels(1, len(metrics), 2.1, sharey=share_y)
        for ax, metric in zip(axes[0], metrics, strict=True):
            _draw_curves(ax, settings, metric, smooth)
            ax.set_title(TITLES.get(metric, "") if len(metrics) > 1 else "")
            if share_y:
                ax.label_outer()
        shown = ("", "mean and each of ", "mean and 95% interval of ")[min(unit_count(longest), 3) - 1]
        legend_above(figure, axes[0], [f"{shown}{describe_repeats(longest)}", _smoothing(smooth)])
    return figure


def _labelled(study: Study) -> list[Setting]:
    """The settings in order; the label has the fingerprint if no other option of a label tells two settings apart."""
    settings = [
        replace(one, label=one.label + ("" if one["aqn.name"] == "none" else f", AQN {one.noise}"))
        for one in label_settings(study.settings)
    ]
    counts = Counter(setting.label for setting in settings)
    return [
        replace(one, label=f"{one.label}, {one.runs[0].identity()['fingerprint']}") if counts[one.label] > 1 else one
        for one in settings
    ]


def _draw_curves(ax: Axes, settings: Sequence[Setting], metric: str, smooth: int) -> None:
    drawn = [setting for setting in settings if not setting.runs[0].series("train", metric).empty]
    require(bool(drawn), f"none of these runs has the metric {metric}: choose runs whose algorithm writes it")
    marks = Counter((setting["quant.name"], setting["aqn.name"]) for setting in drawn)
    mixed = len({aqn for _, aqn in marks}) > 1  # otherwise dashes would mean nothing
    told_apart = len({quant for quant, _ in marks}) > 1 or max(marks.values()) == 1
    for number, setting in enumerate(drawn):
        quant, aqn = setting["quant.name"], setting["aqn.name"]
        table = average_seeds(by_cell(setting.runs, lambda run: run.series("train", metric)))
        names = " and ".join(run.name for run in setting.runs)
        require(not table.empty, f"{names} have no step in common: leave one out")
        dashes = line_style(aqn) if mixed else "solid"
        share = "accuracy" in metric
        shade = color(quant) if told_apart else OTHER_COLORS[number % len(OTHER_COLORS)]
        line = mean_and_band(ax, moving_average(table, smooth), shade, setting.label, dashes, share)
        if marks[quant, aqn] > 1 or len(table) <= 3:
            line.set_marker(MARKERS[number % len(MARKERS)])
            line.set_markersize(3)
            every = max(1, len(table) // 8)
            line.set_markevery((number * every // len(drawn), every))  # side by side, not on top of each other
    label_axes(ax, metric)


def mean_and_band(
    ax: Axes, seeds: pd.DataFrame, shade: str, label: str, dashes: str = "solid", share: bool = False
) -> Line2D:
    """Draw the mean of `seeds` (steps, seeds) by step, and its 95 % interval or, of two seeds, each; return the line.

    The interval of a `share` is cut at 0 and 1. The vertical axis is fitted to the seeds, so that wide intervals do not
    flatten the curves.
    """
    mean = seeds.mean(axis=1, skipna=False)
    several = seeds.shape[1]
    width = 1.2 if several > 1 else 0.8
    (line,) = ax.plot(mean.index, mean, label=label, color=shade, linestyle=dashes, linewidth=width)
    if several == 2:
        ax.plot(seeds.index, seeds, color=shade, linestyle=dashes, linewidth=0.5, alpha=0.5, label="_each seed")
    if several > 2:
        halves = np.array([mean_ci(values).half_width for values in seeds.to_numpy()])
        ends = [(mean + side * halves).clip(*((0, 1) if share else (None, None))).to_numpy() for side in (-1, 1)]
        band = FillBetweenPolyCollection(
            "x", mean.index.to_numpy(), *ends, color=shade, alpha=0.15,
            linewidth=0, label=f"_95% interval of {several} seeds",
        )  # fmt: skip
        ax.add_collection(band, autolim=False)
        ax.update_datalim([(mean.index[0], value) for value in (seeds.min().min(), seeds.max().max())])
        ax.autoscale_view()
    return line


# --- one run ---------------------------------------------------------------------------------------------------------


def run_figures(run_dir: str | os.PathLike[str]) -> list[Path]:
    """Draw one run into its folder figures/ and return the files: reward.* and entropy.*, each as SVG and PNG.

    A run without rollouts (algo=sft) gets loss.* instead. Raises ConfigError if the run has no training step yet.
    """
    run = load_run(run_dir)
    figures = {}
    if not run.series("train", "reward/mean").empty:
        figures["reward"] = reward_figure(run)
    if not run.series("train", "entropy").empty:
        figures["entropy"] = entropy_figure(run)
    figures = figures or {"loss": loss_figure(run)}
    return [file for name, one in figures.items() for file in save(one, run.path / "figures" / name, ("svg", "png"))]


def reward_figure(run: Run) -> Figure:
    """Reward and accuracy of the rollouts by step, and held-out accuracy ±1 s.e. over questions.

    The first and last evaluation are of all held-out questions; the curve between them is of the first few.
    """
    return _training_figure(run, "reward/mean", "accuracy")


def loss_figure(run: Run) -> Figure:
    """Loss by step, and held-out accuracy ±1 s.e. over questions."""
    return _training_figure(run, "loss", None)


def entropy_figure(run: Run) -> Figure:
    """Entropy by step of the sampler, and of the same weights without noise; below it the stages of the noise.

    Nothing is smoothed: a mean around a step would show the effect of a stage before the stage begins.
    """
    sigma = sigma_by_step(run)
    noisy = bool((sigma > 0).any())
    with paper_style():
        figure, axes = panels(1 + noisy, 1, 2.0 + 0.7 * noisy, sharex=True, height_ratios=[3, 1][: 1 + noisy])
        top, bottom = axes[0, 0], axes[-1, 0]
        _trace(top, run, "entropy", 1, label="as sampled, noise in" if noisy else "as sampled")
        label_axes(top, "entropy")
        if noisy:
            if not run.series("train", "entropy_clean").empty:
                _trace(top, run, "entropy_clean", 1, label="same tokens, noise off", linestyle="dashed")
            top.set_xlabel("")
            _draw_noise(bottom, sigma)
        for ax, start in product(axes[:, 0], _stage_starts(sigma)):
            ax.axvline(start - 0.5, color="#CFCFCF", linewidth=0.5, zorder=0.5, label="_stage")
        _step_range(bottom, run)
        figure.align_ylabels()
        legend_above(figure, [top], [_title(run)])
    return figure


def _training_figure(run: Run, metric: str, accuracy: str | None) -> Figure:
    steps = len(run.series("train", metric))
    window = min(11, steps // 20 * 2 + 1)  # odd, at most a tenth of the run or so
    evaluated = any(not run.series("eval", f"eval/accuracy_{decoding}").empty for decoding in HELD_OUT)
    with paper_style():
        figure, axes = panels(1, 1 + (accuracy is not None or evaluated), 2.1)
        _trace(axes[0, 0], run, metric, window, label="rollouts" if accuracy else "training")
        label_axes(axes[0, 0], metric)
        for right in axes[0, 1:]:
            if accuracy:
                _trace(right, run, accuracy, window, label="rollouts")
            _held_out(right, run)
            label_axes(right, "accuracy")
            right.set_ylabel("accuracy")
        for ax in axes[0]:
            _step_range(ax, run)
        legend_above(figure, axes[0], [_title(run), _smoothing(window, " (thin: each step)")])
    return figure


def _title(run: Run) -> str:
    return f"{run.name} on {run.option('task.name')}"


def _trace(ax: Axes, run: Run, metric: str, window: int, **line: Any) -> None:
    """Draw the mean of `window` steps around each step of one metric and, if that is more than one, each step thin."""
    values = run.series("train", metric)
    require(not values.empty, f"{run.path} has no training step with the metric {metric}: nothing to draw")
    shade = color(run.option("quant.name"))
    if window > 1:
        ax.plot(values.index, values, color=shade, linewidth=0.5, alpha=0.35, label="_each step")
    mean = moving_average(values, window)
    width = 1.4 if window > 1 else 1.0
    ax.plot(mean.index, mean, color=shade, linewidth=width, marker="o" if len(mean) <= 3 else "", **line)


def _held_out(ax: Axes, run: Run) -> None:
    """Points with error bars, a little apart for the two ways of decoding, so that neither hides the other."""
    apart = 0.012 * max(1, run.last_step)
    for side, (decoding, marker) in zip((-apart, apart), HELD_OUT.items(), strict=True):
        accuracy = run.series("eval", f"eval/accuracy_{decoding}").dropna()
        if accuracy.empty:
            continue
        error = run.series("eval", f"eval/accuracy_{decoding}_stderr").reindex(accuracy.index)
        ends = [np.minimum(error, accuracy), np.minimum(error, 1 - accuracy)]  # no share is below 0 or above 1
        ax.errorbar(
            accuracy.index + side, accuracy, yerr=ends, fmt=marker, color="#555555", zorder=3, elinewidth=0.9,
            markerfacecolor="#555555" if decoding == "greedy" else "white", label=f"held-out, {decoding} (±1 s.e.)",
        )  # fmt: skip
        lenient = run.series("eval", f"eval/lenient_{decoding}").dropna()
        if not lenient.empty:
            label = f"held-out, {decoding}, by the last number"
            ax.plot(lenient.index + side, lenient, LENIENT[decoding], color="#882255", zorder=3, label=label)
        _validation(ax, run, decoding, marker)


def _validation(ax: Axes, run: Run, decoding: str, marker: str) -> None:
    """The curve of the accuracy on a few held-out questions, if there is one between the ends of the run."""
    points = run.series("validation", f"validation/accuracy_{decoding}").dropna()
    if len(points) < 3:
        return
    questions = int(run.series("validation", "validation/questions").max())
    error = run.series("validation", f"validation/accuracy_{decoding}_stderr").reindex(points.index)
    ax.errorbar(
        points.index, points, yerr=error, fmt=f"{marker}-", color="#A0A0A0", linewidth=0.8, elinewidth=0.5, zorder=2,
        markerfacecolor="#A0A0A0" if decoding == "greedy" else "white", markersize=2.5,
        label=f"first {questions} held-out, {decoding}",
    )  # fmt: skip
    lenient = run.series("validation", f"validation/lenient_{decoding}").dropna()
    ax.plot(lenient.index, lenient, ":", color="#882255", linewidth=0.8, zorder=2, label="_by the last number")


def _stage_starts(sigma: pd.Series) -> list[int]:
    """The steps at which the noise changes; none if there are more than 30."""
    changed = sigma.ne(sigma.shift()) & (sigma.index > sigma.index.min())
    starts = [int(step) for step in sigma.index[changed.to_numpy()]]
    return starts if len(starts) <= 30 else []


def _draw_noise(ax: Axes, sigma: pd.Series) -> None:
    """The noise by step, on a linear scale or, if it spans more than a decade, a logarithmic one that includes zero."""
    ax.plot(sigma.index, sigma, drawstyle="steps-mid", color="#555555", linewidth=1, label="_noise")
    smallest, largest = sigma[sigma > 0].min(), sigma.max()
    if largest > 10 * smallest:
        ax.set_yscale("symlog", linthresh=smallest, linscale=0.5)  # linear from 0 to the smallest noise
        decades = range(math.ceil(math.log10(smallest)), math.floor(math.log10(largest) + 1e-9) + 1)
        ax.yaxis.set_major_locator(FixedLocator([0, *(10.0**decade for decade in decades)]))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.set_ylim(0, 1.6 * largest)
    else:
        ax.set_ylim(0, 1.15 * largest)
    label_axes(ax, "aqn/sigma")


def _step_range(ax: Axes, run: Run) -> None:
    last = max(1, run.last_step)
    ax.set_xlim(-0.04 * last, 1.04 * last)


def moving_average(values: Any, window: int) -> Any:
    """The mean of the `window` rows around each row, fewer at the ends; NaN stays NaN."""
    return values.rolling(window, min_periods=1, center=True).mean().where(values.notna())


def _smoothing(window: int, addition: str = "") -> str:
    return f"smoothed over {window} steps{addition}" if window > 1 else ""
