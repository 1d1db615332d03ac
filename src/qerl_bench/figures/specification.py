"""Specification curves: the effect behind each verdict under every other choice that could have been made."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qerl_bench.claims.specification import Specification
from qerl_bench.figures.forest import BAND, ROW, ZERO
from qerl_bench.figures.style import FULL_WIDTH, caption, panels, paper_style, small

COLUMNS = 3
SHADES = {"sampled": "#000000", "greedy": "#0072B2", "reward": "#000000"}


def specification_table(specifications: Sequence[Specification]) -> pd.DataFrame:
    """A row for each specification; effects in the unit of figures."""
    rows = []
    for one in specifications:
        numbers = (one.estimate.value, one.estimate.low, one.estimate.high)
        effects = dict(zip(("effect", "low", "high"), map(one.measure.on_axis, numbers), strict=True))
        shared = {"claim": one.claim, "contrast": one.contrast, "specification": one.label}
        rows.append(shared | {"decides": one.decides, "units": one.estimate.n} | effects | {"unit": one.measure.unit})
    return pd.DataFrame(rows)


def specification_curve(specifications: Sequence[Specification]) -> Figure:
    """A panel for each contrast, a row for each specification, with 95 % intervals; the margin is a band."""
    kinds = [
        [one for one in specifications if one.measure.unit == unit]
        for unit in dict.fromkeys(one.measure.unit for one in specifications)
    ]
    blocks = [block for kind in kinds for block in _blocks(kind)]
    heights = [0.62 + ROW * len(_labels(block)) for block in blocks]
    columns = max(map(len, blocks))
    with paper_style():
        figure, axes = panels(len(blocks), columns, sum(heights), FULL_WIDTH, height_ratios=heights)
        for row, block in zip(axes, blocks, strict=True):
            for place, ax in enumerate(row):
                if place < len(block):
                    _draw(ax, block[place], _labels(block), named=place == 0)
                else:
                    ax.set_visible(False)
        caption(
            figure,
            "Bars: 95% intervals (Student's t over bases; with other questions, over both). Black: sampled, or reward; "
            "blue: greedy.",
            "Diamonds: what the verdict is about. Hollow: pooled over all studies of the task in which no gate failed.",
            "Grey band: the margin.",
        )
    return figure


Panel = tuple[str, list[Specification]]


def _blocks(kind: Sequence[Specification]) -> list[list[Panel]]:
    """Rows of panels."""
    contrasts = dict.fromkeys((one.claim, one.contrast) for one in kind)
    shown = [
        (f"{claim}: {contrast}", [one for one in kind if (one.claim, one.contrast) == (claim, contrast)])
        for claim, contrast in contrasts
    ]
    return [shown[start : start + COLUMNS] for start in range(0, len(shown), COLUMNS)]


def _labels(block: Sequence[Panel]) -> list[str]:
    """The specifications of a row of panels, of this study first, then pooled."""
    ordered = sorted((one for _, panel in block for one in panel), key=lambda one: one.pooled)
    return [*dict.fromkeys(one.label for one in ordered)]


def _draw(ax: Axes, panel: Panel, labels: Sequence[str], named: bool) -> None:
    title, specifications = panel
    show, margin = specifications[0].measure.on_axis, specifications[0].measure.margin
    ax.axvspan(show(-margin), show(margin), color=BAND, linewidth=0, zorder=0)
    ax.axvline(0, color=ZERO, linewidth=0.7, zorder=1)
    for one in specifications:
        y, shade = labels.index(one.label), SHADES[one.way.split(",")[0]]
        if not math.isnan(one.estimate.stderr):
            ax.plot([show(one.estimate.low), show(one.estimate.high)], [y, y], color=shade, linewidth=1.1)
        ax.plot(
            show(one.estimate.value), y, "D" if one.decides else "o", color=shade, markersize=4.5,
            markerfacecolor="white" if one.pooled else shade,
        )  # fmt: skip
    ax.set_yticks(range(len(labels)), labels if named else [""] * len(labels))
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(False, axis="y")
    ax.set_title("\n".join(textwrap.wrap(title, 29)), loc="left", fontsize=small())
    ax.set_xlabel(f"difference, {specifications[0].measure.unit}")
