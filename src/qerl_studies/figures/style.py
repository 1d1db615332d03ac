"""The look of every figure: size, palette, labels, captions, and files that are the same on any day.

A mark has one meaning in all figures: the color is the weight format; filled points and solid lines have noise.
Settings of one format have OTHER_COLORS, which no format has. Figures are drawn by Agg without pyplot's global state,
so that a run can draw in any process.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FuncFormatter, MaxNLocator
from scipy.optimize import isotonic_regression

from qerl_studies.figures.compact import compact

TEXT_WIDTH = 5.5  # inches: the width of every figure of the docs, unless told otherwise
FULL_WIDTH = 6.75  # inches, for rows of panels with labels and numbers
STYLE = Path(__file__).with_name("paper.mplstyle")


@dataclass(frozen=True)
class Style:
    """Where figures go: widths in inches, and by how much everything is larger than in paper.mplstyle."""

    one_panel: float
    text: float  # several panels
    full: float
    scale: float = 1.0
    formats: tuple[str, ...] = ("pdf",)


STYLES = {
    "docs": Style(TEXT_WIDTH, TEXT_WIDTH, FULL_WIDTH, formats=("svg",)),
    "neurips": Style(5.5, 5.5, 5.5),  # the one column of its pages
    "icml": Style(3.25, 6.75, 6.75),  # one of its two columns, or both
    "slides": Style(9.9, 9.9, 12.15, scale=1.8),  # of 13.33 x 7.5 in; text of 14.4 and 12.6 points
}

# Okabe and Ito's palette for color-blind readers, without its yellow, which is too faint for a line on white.
FORMAT_COLORS = {
    **{"bf16": "#000000", "nf4": "#0072B2", "mxfp4": "#009E73", "nvfp4": "#D55E00"},
    **{"fp8": "#117733", "mxfp8": "#A6761D", "int8": "#88CCEE", "int4": "#AA4499"},
}
OTHER_COLORS = ("#882255", "#56B4E9", "#E69F00", "#7F7F7F", "#CC79A7", "#44AA99", "#999933", "#332288")
SIZES = ("size", "width", "titlepad")  # ends of the names of settings in points
GRAY, BAND = "#777777", "#E6E6E6"  # a reference line; the margin of a claim

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


_style = STYLES["docs"]  # of this process, like matplotlib's own settings


def use_style(name: str) -> Style:
    """Draw every further figure of this process in one of STYLES."""
    global _style
    _style = STYLES[name]
    return _style


class PaperFigure(Figure):
    """A figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        with paper_style():
            self.savefig(buffer, format="png", dpi=144)  # two pixels a point
        return buffer.getvalue()


def paper_style() -> AbstractContextManager[None]:
    """The context in which every figure of this project is made, drawn on and saved."""
    sizes = matplotlib.rc_params_from_file(STYLE, use_default_template=False)
    scaled: dict[Any, Any] = {key: value * _style.scale for key, value in sizes.items() if key.endswith(SIZES)}
    return matplotlib.rc_context(scaled, STYLE)


def small() -> float:
    """Points of ticks, captions and numbers; nothing is smaller. Call inside `paper_style`."""
    return matplotlib.rcParams["xtick.labelsize"]


def inches(width: float, height: float, columns: int) -> tuple[float, float]:
    """Width and height of a figure of `columns` panels in the style in use, from those of one in the docs."""
    if width <= TEXT_WIDTH:
        return _style.text if columns > 1 else _style.one_panel, height * _style.scale
    full = width if _style is STYLES["docs"] else _style.full  # a page is no wider for more panels
    return full, height * _style.scale


def color(quant: str) -> str:
    """The color of a weight format; an unknown format has one of OTHER_COLORS, always the same."""
    return FORMAT_COLORS.get(quant, OTHER_COLORS[zlib.crc32(quant.encode()) % len(OTHER_COLORS)])


def format_order(quant: str) -> int:
    """The position of a format in a figure: known formats first."""
    return [*FORMAT_COLORS, quant].index(quant)


def line_style(aqn: str) -> str:
    """Dashed without noise, solid with it."""
    return "dashed" if aqn == "none" else "solid"


def panels(rows: int, columns: int, height: float, width: float = TEXT_WIDTH, **layout: Any) -> tuple[Figure, Any]:
    """A figure of `width` x `height` inches and its axes, an array (rows, columns). Call inside `paper_style`.

    In other styles than that of the docs it has their width, and their scale.
    """
    figure = PaperFigure(figsize=inches(width, height, columns))
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **layout)


def save(figure: Figure, path: str | os.PathLike[str], formats: Sequence[str] = ("svg",)) -> list[Path]:
    """Write `path`.FORMAT for each of `formats` (svg, pdf, png); the same figure gives the same bytes on any day."""
    base = Path(path)
    base.parent.mkdir(parents=True, exist_ok=True)
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}
    files = [base.with_name(f"{base.name}.{kind}") for kind in formats]
    with paper_style():
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # another pass, or another resolution, would change the layout
        for kind, file in zip(formats, files, strict=True):
            figure.savefig(file, metadata=dates[kind])
            if kind == "svg":
                file.write_text(compact(file.read_text()))
    return files


def label_axes(ax: Axes, metric: str) -> None:
    """Name and unit of `metric` on the vertical axis, whole steps on the other; shares are in per cent."""
    ax.set_xlabel("step")
    ax.set_ylabel(LABELS.get(metric, metric))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if "accuracy" in metric:
        ax.yaxis.set_major_formatter(FuncFormatter(percent))


def percent(share: float, _: object = None) -> str:
    return f"{round(100 * share, 6):g}%"


def margin_band(ax: Axes, low: float, high: float, along: Literal["x", "y"], shade: str = BAND) -> None:
    """The margin as a band and a line at 0, where effects lie `along` an axis."""
    span, line = (ax.axvspan, ax.axvline) if along == "x" else (ax.axhspan, ax.axhline)
    span(low, high, color=shade, linewidth=0, zorder=0)
    line(0, color=GRAY, linewidth=0.7, zorder=1, label="_control")


def caption(figure: Figure, *sentences: str) -> None:
    """Put `sentences` under the panels, wrapped at the figure's width; the figure grows by their height."""
    wide = figure.bbox.width - 0.16 * figure.dpi
    lines = [""]
    for word in " ".join(filter(None, sentences)).split(" "):
        longer = f"{lines[-1]} {word}".lstrip()
        if lines[-1] and _width(figure, longer) > wide:
            lines.append(word)
        else:
            lines[-1] = longer
    figure.supxlabel("\n".join(lines), x=0.08 / figure.get_figwidth(), ha="left", fontsize=small(), linespacing=1.25)
    figure.set_figheight(figure.get_figheight() + (1.3 * small() * len(lines) + 4) / 72)


def _width(figure: Figure, text: str) -> float:
    """The width of `text` at the size of a caption, in pixels: the larger of that on a screen and on paper."""
    assert isinstance(figure.canvas, FigureCanvasAgg)
    font = FontProperties(size=small())
    on_screen = figure.canvas.get_renderer().get_text_width_height_descent(text, font, ismath=False)[0]
    on_paper = text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] * figure.dpi / 72
    return max(on_screen, on_paper)


def label_ends(ax: Axes, ends: Iterable[tuple[float, str, str]], size: float | None = None) -> None:
    """Write each (value, text, color) at the right of `ax` at its value, moved apart where they would overlap."""
    ordered = sorted(ends)
    size = small() if size is None else size
    figure = ax.get_figure(root=True)
    if not ordered or figure is None:
        return
    figure.draw_without_rendering()
    (low, high), box = ax.get_ylim(), ax.get_window_extent()
    apart = 1.2 * size / 72 * figure.dpi / box.height
    wanted = np.clip([(value - low) / (high - low) for value, *_ in ordered], 0, 1)
    spaced = apart * np.arange(len(ordered))
    heights = isotonic_regression(wanted - spaced).x + spaced  # as near as possible, each `apart` above the last
    heights = np.maximum(heights, spaced)  # not over the ticks below
    for height, (_, text, shade) in zip(heights, ordered, strict=True):
        ax.annotate(
            text, (1, height), (3, 0), xycoords="axes fraction", textcoords="offset points", color=shade,
            va="center", fontsize=size, annotation_clip=False,
        )  # fmt: skip


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
