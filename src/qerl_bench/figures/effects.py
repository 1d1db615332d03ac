"""Figures of one number per run: what an arm is above its control, in pairs, with the margin of the claim as a band.

Learning curves are in curves.py; what is paired with what, and how sure that is, in paired.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qerl_bench.claims.gates import LOST, diverged
from qerl_bench.figures.paired import Column, by_cell, effect, interval_note, level, over_bases, repeated
from qerl_bench.figures.style import (
    BAND,
    FULL_WIDTH,
    GREY,
    SMALL,
    caption,
    colour,
    panels,
    paper_style,
)
from qerl_bench.study.load import Run
from qerl_bench.study.select import Row

BANDS = "Grey band: the margin, within which a difference would not matter."
CROSS = f"×: one of the pair diverged: it ended more than {100 * LOST:.0f} points of accuracy below its own best."


@dataclass(frozen=True)
class Line:
    """One arm in a figure of differences; without a `control` it is a heading, or the control itself."""

    label: str
    runs: Sequence[Run] = ()
    control: Sequence[Run] = ()
    shade: str = GREY
    filled: bool = True


def line(row: Row, label: str, control: Row | None, shade: str = "") -> Line:
    """The line of a setting (see `select.arms`): its format's colour, filled with noise."""
    own = shade or colour(row["quant.name"])
    return Line(label, row["runs"], control["runs"] if control else (), own, row["aqn.name"] != "none")


# --- rows ------------------------------------------------------------------------------------------------------------


def effect_rows(lines: Sequence[Line], columns: Sequence[Column], *notes: str) -> Figure:
    """A row per line and a panel per column: the paired difference to its control, and its own level as a number."""
    lines = _filled(lines)
    with paper_style():
        figure, axes = panels(1, len(columns), 0.55 + 0.17 * len(lines), FULL_WIDTH, sharey=True)
        draw_rows(axes[0], lines, columns)
        caption(figure, *notes, *marks(lines, columns))
    return figure


def draw_rows(axes: Sequence[Axes], lines: Sequence[Line], columns: Sequence[Column]) -> None:
    for ax, column in zip(axes, columns, strict=True):
        ax.axvspan(column.shown(-column.margin), column.shown(column.margin), color=BAND, linewidth=0, zorder=0)
        ax.axvline(0, color=GREY, linewidth=0.7, zorder=1, label="_control")
        for height, one in enumerate(lines):
            if one.control:
                draw_effect(ax, height, one, column, along="x")
            if one.runs:
                ax.annotate(
                    level(one.runs, column), (1, height), (3, 0), xycoords=("axes fraction", "data"),
                    textcoords="offset points", va="center", fontsize=SMALL, color="#555555",
                )  # fmt: skip
        ax.set_title(column.label)
        ax.set_xlabel("difference, %" if column.ratio else f"difference{f', {column.unit}' if column.unit else ''}")
        ax.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
        ax.set_yticks(range(len(lines)), [one.label for one in lines])
        ax.set_ylim(len(lines) - 0.4, -0.6)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="y", visible=False)
    for tick, one in zip(axes[0].get_yticklabels(), lines, strict=True):
        tick.set_color(one.shade if one.runs else "black")
        tick.set_fontweight("normal" if one.runs else "bold")


def draw_effect(ax: Axes, position: float, one: Line, column: Column, along: str) -> None:
    """Draw a dot with its interval, the differences behind it, at `position` on the axis that is not `along`."""
    mean, points = effect(one.runs, one.control, column)
    lost, its = (
        over_bases(by_cell(arm, lambda run: float(diverged(run)))).to_numpy()[0] for arm in (one.runs, one.control)
    )
    crosses = lost + its > 0
    middle, *ends = (column.shown(value) for value in (mean.mean, mean.low, mean.high))
    drawn = [column.shown(value) for value in points]
    for marker, chosen in ((".", ~crosses), ("x", crosses)):
        values = [value for value, there in zip(drawn, chosen, strict=True) if there]
        at = [position] * len(values)
        ax.plot(
            *((values, at) if along == "x" else (at, values)), marker, color=one.shade, alpha=0.45, markersize=3,
            markeredgewidth=0.7, label="_units", zorder=2,
        )  # fmt: skip
    reach = [[0.0], [0.0]] if len(points) == 1 else [[middle - ends[0]], [ends[1] - middle]]
    ax.errorbar(
        *((middle, position) if along == "x" else (position, middle)), fmt="o", color=one.shade, elinewidth=1.1,
        markerfacecolor=one.shade if one.filled else "white", label=f"_{one.label}", zorder=3, capsize=0,
        markersize=4.5, xerr=reach if along == "x" else None, yerr=reach if along == "y" else None,
    )  # fmt: skip


def _filled(lines: Sequence[Line]) -> list[Line]:
    """`lines`, all of them filled unless some have noise and some have none."""
    mixed = len({one.filled for one in lines if one.control}) > 1
    return [replace(one, filled=one.filled or not mixed) for one in lines]


def marks(lines: Sequence[Line], columns: Sequence[Column], levels: bool = True) -> list[str]:
    """The sentences that say what is drawn, for a caption."""
    runs = [run for one in lines for run in one.runs]
    noisy = {one.filled for one in lines if one.control}
    filled = "Filled: with noise, hollow: without." if len(noisy) == 2 else ""
    fallen = CROSS if any(map(diverged, runs)) else ""
    numbers = "Numbers: each arm's own mean." if levels else ""
    return [interval_note(lines[-1].runs), numbers, filled, margins(columns), fallen]


def margins(columns: Sequence[Column]) -> str:
    said = [
        f"{column.label} ±{column.shown(column.margin):.3g}{'%' if column.ratio else f' {column.unit}'.rstrip()}"
        for column in columns
        if column.margin
    ]
    return f"{BANDS[:-1]} ({', '.join(said)})." if said else ""


def level_rows(lines: Sequence[Line], columns: Sequence[Column], *notes: str) -> Figure:
    """A row per line and a panel per column, from 0: each arm's own level and, below it, its ratio to its control."""
    lines = _filled(lines)
    with paper_style():
        figure, axes = panels(1, len(columns), 0.5 + 0.36 * len(lines), FULL_WIDTH, sharey=True)
        for ax, column in zip(axes[0], columns, strict=True):
            for height, one in enumerate(lines):
                values = [column.of(run) for run in one.runs]
                ax.plot(values, [height] * len(values), ".", color=one.shade, alpha=0.45, markersize=3, label="_units")
                shown = one.shade if one.filled else "white"
                mean = float(np.mean(values))
                ax.plot(mean, height, "o", color=one.shade, markerfacecolor=shown, label=f"_{one.label}")
                text = column.level.format(mean)
                if one.control:
                    found = effect(one.runs, one.control, column)[0]
                    ratio, low, high = (f"{np.exp(value):.2f}" for value in (found.mean, found.low, found.high))
                    text += f", ×{ratio}" + (f" [{low}, {high}]" if found.n > 1 and not found.identical else "")
                ax.annotate(
                    text, (0, height), (2, -8), xycoords=("axes fraction", "data"), textcoords="offset points",
                    va="center", fontsize=SMALL, color="#555555",
                )  # fmt: skip
            ax.set_xlim(left=0)
            ax.margins(x=0.08)
            ax.set_xlabel(column.label)
            ax.xaxis.set_major_locator(MaxNLocator(nbins=4))
            ax.set_yticks(range(len(lines)), [one.label for one in lines])
            ax.set_ylim(len(lines) - 0.3, -0.5)
            ax.tick_params(axis="y", length=0)
            ax.grid(axis="y", visible=False)
        for tick, one in zip(axes[0][0].get_yticklabels(), lines, strict=True):
            tick.set_color(one.shade)
        first = lines[0]
        runs = f"Points: {repeated(first.runs)}; small: each. " if len(first.runs) > 1 else "A single seed. "
        ratio = (
            f"Numbers: mean and, for the others, ratio to {first.label} with its 95% interval (Student's t, in pairs)."
        )
        marks = "Filled: with noise, hollow: without." if len({one.filled for one in lines}) == 2 else ""
        caption(figure, *notes, runs + ratio, marks)
    return figure
