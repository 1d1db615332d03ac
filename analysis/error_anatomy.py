"""What kind of error each packed layer makes: scale bias, dead zone and grid noise, by layer, format and quantizer.

python analysis/error_anatomy.py runs/ --out figures/
"""

import argparse
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from qerl_bench.errors import require
from qerl_bench.results.script import guarded
from qerl_bench.results.style import legend_above, panels, paper_style, save

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
    table = pd.concat([pd.read_parquet(file) for file in files]).query("relative_error > 0")
    print(*save(draw(table.drop_duplicates(["quant", "quantizer", "layer"])), options.out / "error_anatomy"), sep="\n")


if __name__ == "__main__":
    guarded(main)
