"""Figures of one number per run: the paired difference of an arm to its control, with the margin of the claim as a
band.

curves.py has learning curves, paired.py what is paired and how large the interval is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qerl_studies.claims.preconditions import LOST, diverged
from qerl_studies.effects.pairs import average_seeds, by_cell
from qerl_studies.figures.paired import correlation_note, effect, interval_note, level
from qerl_studies.figures.style import FULL_WIDTH, GRAY, caption, color, margin_band, panels, paper_style, small
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import Measure
from qerl_studies.runs.settings import Setting, describe_repeats

BANDS = "Grey band: the margin, within which a difference would not matter."
CROSS = f"×: one of the pair diverged: it ended more than {100 * LOST:.0f} points of accuracy below its own best."


@dataclass(frozen=True)
class PlottedArm:
    """One arm in a figure of differences. Without a `control` it is the control itself; without `runs`, a heading."""

    label: str
    runs: Sequence[Run] = ()
    control: Sequence[Run] = ()
    shade: str = GRAY
    filled: bool = True


def plotted_arm(setting: Setting, label: str, control: Setting | None, shade: str = "") -> PlottedArm:
    """A setting in the color of its format, filled if it has noise."""
    shade = shade or color(setting["quant.name"])
    return PlottedArm(label, setting.runs, control.runs if control else (), shade, setting["aqn.name"] != "none")


def dot_plot(arms: Sequence[PlottedArm], measures: Sequence[Measure], *notes: str) -> Figure:
    """A row per arm and a panel per measure: the paired difference to its control, and its own mean as a number."""
    arms = _filled(arms)
    with paper_style():
        figure, axes = panels(1, len(measures), 0.55 + 0.17 * len(arms), FULL_WIDTH, sharey=True)
        draw_dots(axes[0], arms, measures)
        caption(figure, *notes, *mark_notes(arms, measures))
    return figure


def draw_dots(axes: Sequence[Axes], arms: Sequence[PlottedArm], measures: Sequence[Measure]) -> None:
    """The panels of `dot_plot`."""
    for ax, measure in zip(axes, measures, strict=True):
        margin_band(ax, *measure.band, "x")
        for height, arm in enumerate(arms):
            if arm.control:
                draw_effect(ax, height, arm, measure, along="x")
            if arm.runs:
                ax.annotate(
                    measure.level_format.format(level(arm.runs, measure)), (1, height), (3, 0), va="center",
                    xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=small(), color="#555555",
                )  # fmt: skip
        ax.set_title(measure.name)
        ax.set_xlabel("difference, %" if measure.ratio else f"difference{f', {measure.unit}' if measure.unit else ''}")
        ax.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
        label_rows(ax, [arm.label for arm in arms])
    for tick, arm in zip(axes[0].get_yticklabels(), arms, strict=True):
        tick.set_color(arm.shade if arm.runs else "black")
        tick.set_fontweight("normal" if arm.runs else "bold")


def label_rows(ax: Axes, labels: Sequence[str], top: float = 0.6, bottom: float = 0.4) -> None:
    """A labelled row per integer of the vertical axis, from the top down."""
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - bottom, -top)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)


def draw_effect(ax: Axes, position: float, arm: PlottedArm, measure: Measure, along: str) -> None:
    """Draw the mean difference with its interval, and the single differences, `along` x or y."""
    found = effect(arm.runs, arm.control, measure)
    estimate, points = found.whole, found.by_unit
    shares = [average_seeds(by_cell(runs, lambda run: float(diverged(run)))) for runs in (arm.runs, arm.control)]
    crossed_out = np.sum([table.to_numpy()[0] for table in shares], axis=0) > 0
    middle, low, high = measure.ends_on_axis(estimate)
    on_axis = [measure.on_axis(value) for value in points]
    for marker, chosen in ((".", ~crossed_out), ("x", crossed_out)):
        values = [value for value, wanted in zip(on_axis, chosen, strict=True) if wanted]
        at = [position] * len(values)
        ax.plot(
            *((values, at) if along == "x" else (at, values)), marker, color=arm.shade, alpha=0.45, markersize=3,
            markeredgewidth=0.7, label="_units", zorder=2,
        )  # fmt: skip
    reach = [[0.0], [0.0]] if len(points) == 1 else [[middle - low], [high - middle]]
    ax.errorbar(
        *((middle, position) if along == "x" else (position, middle)), fmt="o", color=arm.shade, elinewidth=1.1,
        markerfacecolor=arm.shade if arm.filled else "white", label=f"_{arm.label}", zorder=3, capsize=0,
        markersize=4.5, xerr=reach if along == "x" else None, yerr=reach if along == "y" else None,
    )  # fmt: skip


def _filled(arms: Sequence[PlottedArm]) -> list[PlottedArm]:
    """The arms, all filled unless some have noise and some have none."""
    mixed = len({arm.filled for arm in arms if arm.control}) > 1
    return [replace(arm, filled=arm.filled or not mixed) for arm in arms]


def mark_notes(arms: Sequence[PlottedArm], measures: Sequence[Measure], levels: bool = True) -> list[str]:
    """The sentences of a caption that explain the marks."""
    mixed = len({arm.filled for arm in arms if arm.control}) == 2
    bases = {arm.label: len({run.base for run in arm.runs}) for arm in arms if arm.runs}
    most = max((arm for arm in reversed(arms) if arm.runs), key=lambda arm: bases[arm.label])
    fewer = [f"{number} for {label}" for label, number in bases.items() if number < bases[most.label]]
    return [
        interval_note(most.runs, measures),
        f"Fewer, {', '.join(fewer)}." if fewer else "",
        "Numbers: each arm's own mean." if levels else "",
        "Filled: with noise, hollow: without." if mixed else "",
        margin_note(measures),
        correlation_note(effect(arm.runs, arm.control, one) for arm in arms if arm.control for one in measures),
        CROSS if any(diverged(run) for arm in arms for run in arm.runs) else "",
    ]


def margin_note(measures: Sequence[Measure]) -> str:
    margins = [
        f"{one.name} ±{one.on_axis(one.margin):.3g}{'%' if one.ratio else f' {one.unit}'.rstrip()}"
        for one in measures
        if one.margin
    ]
    return f"{BANDS[:-1]} ({', '.join(margins)})." if margins else ""


def level_plot(arms: Sequence[PlottedArm], measures: Sequence[Measure], *notes: str) -> Figure:
    """A row per arm and a panel per measure, from 0: the arm's own mean and, below it, its ratio to its control."""
    arms = _filled(arms)
    with paper_style():
        figure, axes = panels(1, len(measures), 0.5 + 0.36 * len(arms), FULL_WIDTH, sharey=True)
        for ax, measure in zip(axes[0], measures, strict=True):
            for height, arm in enumerate(arms):
                values = [measure.number(run) for run in arm.runs]
                ax.plot(values, [height] * len(values), ".", color=arm.shade, alpha=0.45, markersize=3, label="_units")
                face = arm.shade if arm.filled else "white"
                mean = float(np.mean(values))
                ax.plot(mean, height, "o", color=arm.shade, markerfacecolor=face, label=f"_{arm.label}")
                text = measure.level_format.format(mean)
                if arm.control:
                    estimate = effect(arm.runs, arm.control, measure).whole
                    ratio, low, high = (f"{np.exp(x):.2f}" for x in (estimate.value, estimate.low, estimate.high))
                    text += f", ×{ratio}" + (f" [{low}, {high}]" if estimate.n > 1 and not estimate.identical else "")
                ax.annotate(
                    text, (0, height), (2, -8), xycoords=("axes fraction", "data"), textcoords="offset points",
                    va="center", fontsize=small(), color="#555555",
                )  # fmt: skip
            ax.set_xlim(0, 1.05 * max(measure.number(run) for arm in arms for run in arm.runs))
            ax.set_xlabel(measure.name)
            ax.xaxis.set_major_locator(MaxNLocator(nbins=4))
            label_rows(ax, [arm.label for arm in arms], top=0.5, bottom=0.3)
        for tick, arm in zip(axes[0][0].get_yticklabels(), arms, strict=True):
            tick.set_color(arm.shade)
        first = arms[0]
        points = f"Points: {describe_repeats(first.runs)}; small: each." if len(first.runs) > 1 else "A single seed."
        ratio = (
            f"Numbers: mean and, for the others, ratio to {first.label} with its 95% interval (Student's t, in pairs)."
        )
        marks = "Filled: with noise, hollow: without." if len({arm.filled for arm in arms}) == 2 else ""
        effects = (effect(arm.runs, arm.control, one) for arm in arms if arm.control for one in measures)
        caption(figure, *notes, points, ratio, marks, correlation_note(effects))
    return figure
