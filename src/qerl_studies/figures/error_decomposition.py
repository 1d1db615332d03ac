"""The error of each packed layer, as a figure: `qerl-bench figure` draws it from the files of runs."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qerl_core.checks import ConfigError
from qerl_studies.figures.effects import label_rows
from qerl_studies.figures.style import FULL_WIDTH, caption, color, format_order, panels, paper_style, small

TOLERANCE = 1e-3  # relative difference that rounding on another device may make
PARTS = {
    "dead_zone": "in weights rounded to zero (dead zone)",
    "scale_bias": "a change of scale of layers (scale bias)",
}
COLUMNS = ["layer", "quant", "quantizer", "relative_error", "output_error", *PARTS]  # of layers.parquet, that it reads
QUANTIZERS = ("rtn", "mse", "awq", "gptq")


def one_of_each(table: pd.DataFrame) -> pd.DataFrame:
    """One row for each packed layer. Raises ConfigError if files tell different things of a layer, as of two models."""
    key = ["quant", "quantizer", "layer"]
    first = table.drop_duplicates(key)
    both = table.merge(first, on=key, suffixes=("", "_first"))
    other = both[(both["relative_error"] / both["relative_error_first"] - 1).abs() > TOLERANCE]
    if len(other) > 0:
        row = other.iloc[0]
        raise ConfigError(
            f"{row['layer']} with quant={row['quant']} and quantizer={row['quantizer']} has an error of "
            f"{row['relative_error_first']:.4f} in {row['file_first']} and of {row['relative_error']:.4f} in "
            f"{row['file']}: these come from different models or options. Give folders of one of them"
        )
    return first


def draw(table: pd.DataFrame) -> Figure:
    """A column per format, a row of dots per quantizer: above the error of the weights, below that of the outputs.

    Small points are layers. Output errors are missing where no text was run through the layers.
    """
    quants = sorted(set(table["quant"]), key=format_order)
    quantizers = sorted(set(table["quantizer"]), key=lambda name: [*QUANTIZERS, name].index(name))
    measures = {"relative_error": "error of the weights, %", "output_error": "error of the outputs, %"}
    with paper_style():
        figure, axes = panels(2, len(quants), 0.9 + 0.36 * len(quantizers), FULL_WIDTH, sharey=True)
        unknown = []
        for row, (measure, label) in enumerate(measures.items()):
            most = 100 * float(np.nanmax(np.append(table[measure].to_numpy(), 0.0)))
            for ax, quant in zip(axes[row], quants, strict=True):
                for height, quantizer in enumerate(quantizers):
                    layers = table[(table["quant"] == quant) & (table["quantizer"] == quantizer)]
                    values = 100 * np.array(layers[measure], dtype=float)
                    values = values[~np.isnan(values)]
                    if len(values) == 0:
                        unknown.append(f"{quant.upper()} with {quantizer} ({measure.split('_')[0]})")
                        continue
                    ax.plot(values, [height] * len(values), ".", color=color(quant), alpha=0.35, markersize=3)
                    mean = float(np.sqrt((values**2).mean()))
                    ax.plot(mean, height, "o", color=color(quant), markersize=4.5, label=f"_{quantizer}")
                    ax.annotate(
                        f"{mean:.1f}", (1, height), (3, 0), xycoords=("axes fraction", "data"), va="center",
                        textcoords="offset points", fontsize=small(), color="#555555",
                    )  # fmt: skip
                label_rows(ax, quantizers)
                ax.set_xlim(0, 1.05 * most or 1)
                ax.xaxis.set_major_locator(MaxNLocator(nbins=4))
                ax.set_xlabel(label)
                ax.set_title(quant.upper() if row == 0 else "", color=color(quant))
        caption(figure, *_notes(table), f"Not measured: {', '.join(unknown)}." if unknown else "")
    return figure


def _notes(table: pd.DataFrame) -> list[str]:
    """What is drawn, and how much of the squared error is of which kind: too little to be seen beside the rest."""
    parts = []
    for part, name in PARTS.items():
        shares = []
        for _, layers in table.groupby(["quant", "quantizer"]):
            squares = layers["relative_error"].to_numpy() ** 2
            shares.append(100 * float(layers[part].to_numpy().sum() / squares.sum()))
        parts.append(f"{min(shares):.1f} to {max(shares):.1f}% {name}")
    return [
        "Large points and numbers: root mean square over layers; small: layers. Weights: ||W - Q|| / ||W||. Outputs: "
        "||X (W - Q)^T|| / ||X W^T|| on the text X that awq and gptq were calibrated with, so in their favour.",
        f"Of the squared error of the weights is {', '.join(parts)}; the rest is the spacing of the code table.",
    ]
