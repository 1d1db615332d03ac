"""The error of each packed layer, as a figure: what analysis/error_anatomy.py draws of the files that runs leave."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from qerl_bench.errors import BadInput
from qerl_bench.results.style import legend_above, panels, paper_style

SAME = 1e-3  # relative difference of errors that rounding on another device may make
COLOURS = {"grid_noise": "#56B4E9", "dead_zone": "#D55E00", "scale_bias": "#000000"}


def one_of_each(table: pd.DataFrame) -> pd.DataFrame:
    """One row for each packed layer. Raises BadInput if files tell different things of a layer, as of two models."""
    key = ["quant", "quantizer", "layer"]
    first = table.drop_duplicates(key)
    both = table.merge(first, on=key, suffixes=("", "_first"))
    other = both[(both["relative_error"] / both["relative_error_first"] - 1).abs() > SAME]
    if len(other) > 0:
        row = other.iloc[0]
        raise BadInput(
            f"{row['layer']} with quant={row['quant']} and quantizer={row['quantizer']} has an error of "
            f"{row['relative_error_first']:.4f} in {row['file_first']} and of {row['relative_error']:.4f} in "
            f"{row['file']}: these come from different models or options. Give folders of one of them"
        )
    return first


def draw(table: pd.DataFrame) -> Figure:
    """A row per quantizer, a column per format; bars by layer, in the model's order, shaded block by block."""
    quants, quantizers = list(dict.fromkeys(table["quant"])), list(dict.fromkeys(table["quantizer"]))
    with paper_style():
        figure, axes = panels(len(quantizers), len(quants), 0.3 + 1.1 * len(quantizers), sharex=True, sharey=True)
        for ax in axes.flat:
            ax.set_visible(False)
        groups: dict[Any, pd.DataFrame] = dict(iter(table.groupby(["quant", "quantizer"], sort=False)))
        for (quant, quantizer), rows in groups.items():
            ax = axes[quantizers.index(quantizer), quants.index(quant)]
            ax.set_visible(True)
            below = 0.0 * rows["grid_noise"].to_numpy()
            for part, colour in COLOURS.items():
                heights = 100 * rows[part].to_numpy()
                ax.bar(range(len(rows)), heights, 1.0, below, color=colour, label=part.replace("_", " "), linewidth=0)
                below = below + heights
            blocks = rows["layer"].str.extract(r"\.(\d+)\.")[0].fillna("0").astype(int)
            for position in (blocks % 2).to_numpy().nonzero()[0]:
                ax.axvspan(position - 0.5, position + 0.5, color="#F0F0F0", zorder=0, linewidth=0)
            ax.set_title(f"{quant.upper()}, {quantizer}")
            ax.set_xlim(-0.5, len(rows) - 0.5)
        figure.supxlabel("layer, in the model's order (shaded: every other block)", fontsize="medium")
        figure.supylabel("squared error, %\nof the weights' energy", fontsize="medium")
        legend_above(figure, [axes[0, 0]], [])
    return figure
