"""How every figure looks: size, palette, labels, legend, and files that come out the same on any day.

One meaning per mark in all figures: colour = weight format, dashes = no noise. Figures are plain objects drawn by Agg,
without pyplot's global state, so the runner can draw in any process.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

TEXT_WIDTH = 5.5  # inches: the text block of a NeurIPS page, the width of every figure unless told otherwise
COLUMN_WIDTH = 3.25  # inches: one column of a two-column page
STYLE = Path(__file__).with_name("paper.mplstyle")

# Okabe and Ito's palette for colour-blind readers. Its yellow is left out: too faint for a line on white.
FORMAT_COLOURS = {"bf16": "#000000", "nf4": "#0072B2", "mxfp4": "#009E73", "nvfp4": "#D55E00"}
SPARE_COLOURS = ("#CC79A7", "#56B4E9", "#E69F00")

LABELS = {
    "reward/mean": "reward per completion",
    "accuracy": "accuracy of rollouts",
    "entropy": "entropy (nats/token)",
    "entropy_clean": "entropy (nats/token)",
    "loss": "loss",
    "aqn/sigma": "noise $\\sigma$",
    "eval/accuracy_greedy": "held-out accuracy, greedy",
    "eval/accuracy_sampled": "held-out accuracy, sampled",
}
TITLES = {"entropy": "as sampled, noise in", "entropy_clean": "same tokens, noise off"}  # of panels that share a label


class PaperFigure(Figure):
    """A figure that a notebook shows by itself, without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        with paper_style():
            self.savefig(buffer, format="png")
        return buffer.getvalue()


def paper_style() -> AbstractContextManager[None]:
    """The context in which every figure of this project is made, drawn on and saved."""
    return matplotlib.rc_context(fname=STYLE)


def colour(quant: str) -> str:
    """The colour of a weight format; one that this file does not know gets a spare colour, always the same one."""
    return FORMAT_COLOURS.get(quant, SPARE_COLOURS[zlib.crc32(quant.encode()) % len(SPARE_COLOURS)])


def line_style(aqn: str) -> str:
    """Dashed without noise, solid with any kind of it."""
    return "dashed" if aqn == "none" else "solid"


def panels(rows: int, columns: int, height: float, width: float = TEXT_WIDTH, **layout: Any) -> tuple[Figure, Any]:
    """A figure of `width` x `height` inches and its axes, an array (rows, columns). Call inside `paper_style`."""
    figure = PaperFigure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **layout)


def save(figure: Figure, path: str | os.PathLike[str]) -> list[Path]:
    """Write `path`.pdf and `path`.png; the same figure gives the same bytes on any day."""
    base = Path(path)
    base.parent.mkdir(parents=True, exist_ok=True)
    pdf, png = base.with_name(base.name + ".pdf"), base.with_name(base.name + ".png")
    with paper_style():
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # keep this layout: another pass, or another resolution, would move things
        figure.savefig(pdf, metadata={"CreationDate": None})
        figure.savefig(png, metadata={"Software": None})
    return [pdf, png]


def label_axes(ax: Axes, metric: str) -> None:
    """Name and unit of `metric` up the side, whole steps along the bottom; shares are ticked in per cent."""
    ax.set_xlabel("step")
    ax.set_ylabel(LABELS.get(metric, metric))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if "accuracy" in metric:
        ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{round(100 * share, 6):g}%"))


def legend_above(figure: Figure, axes: Sequence[Axes], notes: Sequence[str]) -> None:
    """One legend above the panels: each label once, in as many columns as fit, under a line of `notes`.

    The figure grows by the height of the legend, so the panels keep theirs.
    """
    handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    title = ", ".join(filter(None, notes))
    for columns in (4, 3, 2, 1):
        legend = figure.legend(
            [*handles.values()], [*handles], loc="outside upper center", ncols=columns, title=title or None
        )
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            figure.set_figheight(figure.get_figheight() + legend.get_window_extent().height / figure.dpi)
            break
        legend.remove()
