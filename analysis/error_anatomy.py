"""What kind of error each packed layer makes: scale bias, dead zone and grid noise, by layer, format and quantizer.

python analysis/error_anatomy.py runs/ --out figures/
"""

import argparse
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from qerl_bench.errors import BadInput, require
from qerl_bench.results.script import guarded
from qerl_bench.results.style import legend_above, panels, paper_style, save

SAME = 1e-3  # relative difference of errors that rounding on another device may make
COLOURS = {"grid_noise": "#56B4E9", "dead_zone": "#D55E00", "scale_bias": "#000000"}


def draw(table: pd.DataFrame) -> Figure:
    """A row per quantizer, a column per format; bars by layer, in the model's order, shaded block by block."""
    quants, quantizers = list(dict.fromkeys(table["quant"])), list(dict.fromkeys(table["quantizer"]))
    with paper_style():
        figure, axes = panels(len(quantizers), len(quants), 0.3 + 1.1 * len(quantizers), sharex=True, sharey=True)
        for ax in axes.flat:
            ax.set_visible(False)
        for (quant, quantizer), rows in table.groupby(["quant", "quantizer"], sort=False):
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
        figure.supylabel("squared error, % of the weights' energy", fontsize="medium")
        legend_above(figure, [axes[0, 0]], [])
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw error_anatomy.pdf and .png of runs or exports.")
    parser.add_argument("folders", nargs="+", type=Path, help="folders searched for layers.parquet")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder to write to (default: figures)")
    options = parser.parse_args(arguments)
    files = [file for folder in options.folders for file in sorted(folder.rglob("layers.parquet"))]
    searched = ", ".join(map(str, options.folders))
    require(len(files) > 0, f"no layers.parquet in {searched}: give folders of runs or exports")
    table = pd.concat([pd.read_parquet(file).assign(file=str(file)) for file in files]).query("relative_error > 0")
    print(*save(draw(one_of_each(table)), options.out / "error_anatomy"), sep="\n")


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


if __name__ == "__main__":
    guarded(main)
