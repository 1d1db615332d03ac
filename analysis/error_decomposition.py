"""Draws the error of each packed layer, in weights and outputs, by format and quantizer.

python analysis/error_decomposition.py studies/quantizers/data --out figures/      # or folders of runs or exports
"""

import pandas as pd

from qerl_bench.checks import require
from qerl_bench.commands.exits import guarded
from qerl_bench.studies.figures.error_decomposition import draw, one_of_each
from qerl_bench.studies.figures.script import figure_parser, parse, write_figure
from qerl_bench.studies.runs.find import leave_out


def main(arguments: list[str] | None = None) -> None:
    options = parse(figure_parser(__doc__), arguments)
    found = [file.parent for folder in options.runs for file in sorted(folder.rglob("layers.parquet"))]
    files = [folder / "layers.parquet" for folder in leave_out(found, options.without)]
    folders = ", ".join(map(str, options.runs))
    require(len(files) > 0, f"no layers.parquet in {folders}: give folders of runs, exports or a committed table")
    table = pd.concat([pd.read_parquet(file).assign(file=str(file)) for file in files]).query("relative_error > 0")
    write_figure(draw(one_of_each(table)), options, "error_decomposition")


if __name__ == "__main__":
    guarded(main)
