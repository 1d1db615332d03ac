"""A first look at runs: one metric by step for several runs, and the figures of a single run.

The functions that return a figure leave saving to the caller. What compares arms is drawn as paired differences, by
step in curves.py and as one number per run in effects.py.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
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

from qerl_bench.checks import require
from qerl_bench.figures.paired import by_cell, over_bases, repeated
from qerl_bench.figures.style import (
    TITLES,
    colour,
    label_axes,
    legend_above,
    line_style,
    panels,
    paper_style,
    save,
)
from qerl_bench.statistics import interval
from qerl_bench.study.load import Run, load_run
from qerl_bench.study.naming import format_rows, sigma_of
from qerl_bench.study.select import Row, by_setting, cell

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # what tells settings of one colour and dash apart
HELD_OUT = {"greedy": "o", "sampled": "s"}  # decoding of the held-out questions -> marker


# --- several runs ----------------------------------------------------------------------------------------------------


def comparison(runs: Sequence[Run], metrics: Sequence[str], smooth: int = 1, share_y: bool = False) -> Figure:
    """One panel per metric side by side and a line per setting: runs that differ in nothing but seed and base.

    `smooth` is the number of steps, an odd one, in the mean around each step; fewer at the ends. With several seeds a
    band is the 95 % interval of their mean at each step, over the steps that all of them have; one seed is a thin line.
    A non-finite value leaves a gap. Raises ConfigError if no run has the metric, or if a setting holds a seed twice.
    """
    require(smooth >= 1 and smooth % 2 == 1, f"smooth counts steps and must be odd and at least 1, not {smooth}")
    rows = _labelled(runs)
    most = max((row["runs"] for row in rows), key=len)
    with paper_style():
        figure, axes = panels(1, len(metrics), 2.1, sharey=share_y)
        for ax, metric in zip(axes[0], metrics, strict=True):
            _curves(ax, rows, metric, smooth)
            ax.set_title(TITLES.get(metric, "") if len(metrics) > 1 else "")
            if share_y:
                ax.label_outer()
        several = f"mean and 95% interval of {repeated(most)}" if len(most) > 1 else ""
        legend_above(figure, axes[0], [several, _smoothing(smooth)])
    return figure


def _labelled(runs: Sequence[Run]) -> list[Row]:
    """A row per setting, in one order. What no detail tells from another row has its fingerprint in the label."""
    keys = ("quant.name", "aqn.name")
    rows = format_rows([{key: group[0].option(key) for key in keys} | {"runs": group} for group in by_setting(runs)])
    for row in rows:
        row["label"] += "" if row["aqn.name"] == "none" else f", AQN {row['aqn.name']}"
    counts = Counter(row["label"] for row in rows)
    for row in rows:
        row["label"] += f", {row['runs'][0].identity()['fingerprint']}" if counts[row["label"]] > 1 else ""
    return rows


def _curves(ax: Axes, rows: Sequence[Row], metric: str, smooth: int) -> None:
    found = [row for row in rows if not row["runs"][0].series("train", metric).empty]
    require(bool(found), f"none of these runs has the metric {metric}: choose runs whose algorithm writes it")
    alike = Counter((row["quant.name"], row["aqn.name"]) for row in found)
    mixed = len({aqn for _, aqn in alike}) > 1  # else dashes would tell nothing
    for number, row in enumerate(found):
        names = " and ".join(run.name for run in row["runs"])
        units = {cell(run) for run in row["runs"]}
        require(len(units) == len(row["runs"]), f"{names} repeat one setting with the same seed: leave one out")
        table = over_bases(by_cell(row["runs"], lambda run: run.series("train", metric)))
        require(not table.empty, f"{names} have no step in common: leave one out")
        dashes = line_style(row["aqn.name"]) if mixed else "solid"
        line = mean_and_band(ax, moving_average(table, smooth), colour(row["quant.name"]), row["label"], dashes)
        if alike[row["quant.name"], row["aqn.name"]] > 1 or len(table) <= 3:
            line.set_marker(MARKERS[number % len(MARKERS)])
            line.set_markersize(3)
            every = max(1, len(table) // 8)
            line.set_markevery((number * every // len(found), every))  # side by side, not on top of each other
    label_axes(ax, metric)


def mean_and_band(ax: Axes, seeds: pd.DataFrame, shade: str, label: str, dashes: str = "solid") -> Line2D:
    """Draw the mean of `seeds` (steps, seeds) by step and, for several, the 95 % interval of it; return the line.

    The vertical axis is fitted to the seeds: an interval of two, which is wide, does not flatten the curves.
    """
    mean = seeds.mean(axis=1, skipna=False)
    several = seeds.shape[1] > 1
    width = 1.2 if several else 0.8
    (line,) = ax.plot(mean.index, mean, label=label, color=shade, linestyle=dashes, linewidth=width)
    if several:
        halves = np.array([interval(values).half for values in seeds.to_numpy()])
        band = FillBetweenPolyCollection(
            "x", mean.index.to_numpy(), (mean - halves).to_numpy(), (mean + halves).to_numpy(), color=shade, alpha=0.15,
            linewidth=0, label=f"_95% interval of {seeds.shape[1]} seeds",
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
    drawn = {"reward/mean": ("reward", reward_figure), "entropy": ("entropy", entropy_figure)}
    written = [metric for metric in drawn if not run.series("train", metric).empty]
    chosen = [drawn[metric] for metric in written] or [("loss", loss_figure)]
    return [file for name, draw in chosen for file in save(draw(run), run.path / "figures" / name, ("svg", "png"))]


def reward_figure(run: Run) -> Figure:
    """Reward and accuracy of the rollouts by step, and held-out accuracy with +-1 s.e. of the questions."""
    return _training_figure(run, "reward/mean", "accuracy")


def loss_figure(run: Run) -> Figure:
    """Loss by step, and held-out accuracy with +-1 s.e. of the questions."""
    return _training_figure(run, "loss", None)


def entropy_figure(run: Run) -> Figure:
    """Entropy by step of the policy that sampled and of the same weights without noise; below it, the noise's stages.

    Nothing is smoothed: a mean over neighbours would show the effect of a stage before the stage begins.
    """
    sigma = sigma_of(run)
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
        legend_above(figure, [top], [run.name])
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
        legend_above(figure, axes[0], [run.name, _smoothing(window, " (thin: each step)")])
    return figure


def _trace(ax: Axes, run: Run, metric: str, window: int, **line: Any) -> None:
    """Draw the mean of `window` steps around each step of one metric and, if that is more than one, each step thin."""
    values = run.series("train", metric)
    require(not values.empty, f"{run.path} has no training step with the metric {metric}: nothing to draw")
    shade = colour(run.option("quant.name"))
    if window > 1:
        ax.plot(values.index, values, color=shade, linewidth=0.5, alpha=0.35, label="_each step")
    mean = moving_average(values, window)
    width = 1.4 if window > 1 else 1.0
    ax.plot(mean.index, mean, color=shade, linewidth=width, marker="o" if len(mean) <= 3 else "", **line)


def _held_out(ax: Axes, run: Run) -> None:
    """Points with error bars; the two ways of decoding stand a little apart, so that neither hides the other."""
    apart = 0.012 * max(1, run.last_step)
    for side, (decoding, marker) in zip((-apart, apart), HELD_OUT.items(), strict=True):
        accuracy = run.series("eval", f"eval/accuracy_{decoding}").dropna()
        if accuracy.empty:
            continue
        error = run.series("eval", f"eval/accuracy_{decoding}_stderr").reindex(accuracy.index)
        ax.errorbar(
            accuracy.index + side, accuracy, yerr=error, fmt=marker, color="#555555", zorder=3, elinewidth=0.9,
            markerfacecolor="#555555" if decoding == "greedy" else "white", label=f"held-out, {decoding} (±1 s.e.)",
        )  # fmt: skip


def _stage_starts(sigma: pd.Series) -> list[int]:
    """The steps at which the noise changes; none for a schedule that changes it nearly every step of a long run."""
    changed = sigma.ne(sigma.shift()) & (sigma.index > sigma.index.min())
    starts = [int(step) for step in sigma.index[changed.to_numpy()]]
    return starts if len(starts) <= 30 else []


def _draw_noise(ax: Axes, sigma: pd.Series) -> None:
    """The noise by step: on a logarithmic scale that still holds zero if it spans more than a decade, else linear."""
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
