"""Panels of numbers with intervals by weight format: what probes measured at temperatures, places, sizes of noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from qerl_studies.figures.style import FULL_WIDTH, GRAY, caption, color, legend_above, panels, paper_style

HEIGHT = 2.3  # inches, of a row of panels
Shown = tuple[float, float, float]  # a number and its interval
WIDE = 200.0  # a panel of numbers above it is linear up to LINEAR alone, and logarithmic from there
LINEAR = 10.0
APART = 0.12  # between formats, in steps from place to place


@dataclass(frozen=True, kw_only=True)
class ProbePanel:
    """`lines` are by weight format, one number for each of the places `at`, which are equally far apart.

    The last `apart` numbers are not joined to the others.
    """

    title: str
    axis: str
    at: Sequence[str]
    lines: Mapping[str, Sequence[Shown]]
    label: str
    apart: int = 0


def in_panels(parts: Sequence[ProbePanel], note: str) -> Figure:
    """The panels side by side, two in a row, each with a gray line at 0: no difference to what is compared with."""
    with paper_style():
        rows = (len(parts) + 1) // 2
        figure, axes = panels(rows, min(2, len(parts)), HEIGHT * rows, FULL_WIDTH)
        for ax, part in zip(axes.flat, parts, strict=False):
            ax.axhline(0, color=GRAY, linewidth=0.7, zorder=1)
            for number, (quant, shown) in enumerate(part.lines.items()):
                middle = number - (len(part.lines) - 1) / 2
                places = np.arange(len(part.at)) + APART * middle
                values, lows, highs = np.array(shown).T
                reach = np.nan_to_num([values - lows, highs - values])
                shade, joined = color(quant), len(values) - part.apart
                ax.errorbar(
                    places, values, reach, fmt="o", color=shade, markersize=3.5, elinewidth=1.1,
                    label=quant,
                )  # fmt: skip
                ax.plot(places[:joined], values[:joined], color=shade, linewidth=0.8)
            if max(abs(value) for shown in part.lines.values() for value, *_ in shown) > WIDE:
                ax.set_yscale("symlog", linthresh=LINEAR)
                ax.yaxis.set_major_formatter("{x:g}")
            ax.set_xticks(range(len(part.at)), part.at)
            ax.set_title(part.title)
            ax.set_xlabel(part.axis)
            ax.set_ylabel(part.label)
        for ax in axes.flat[len(parts) :]:
            ax.set_axis_off()
        legend_above(figure, axes.flat[: len(parts)], [])
        caption(figure, note)
    return figure
