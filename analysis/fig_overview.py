"""Formats over all settings they were run in: interquartile mean, probability of beating BF16, and profile.

python analysis/fig_overview.py runs/ --out figures/
"""

import numpy as np

from qerl_bench.commands.exits import guarded
from qerl_bench.studies.figures.aggregate import overview, scores
from qerl_bench.studies.figures.script import figure_parser, parse, write_figure
from qerl_bench.studies.runs.comparable import load_runs
from qerl_bench.studies.runs.measure import final_accuracy


def main(arguments: list[str] | None = None) -> None:
    parser = figure_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (default: 0)")
    options = parse(parser, arguments)
    runs = [run for run in load_runs(options.runs, options.mixed_code, options.without) if run.finished]
    evaluated = [run for run in runs if run.option("algo.name") != "sft" and run.option("eval.name") != "none"]
    tables, settings = scores(evaluated, final_accuracy("sampled"))
    figure = overview(tables, settings, "held-out, sampled", np.random.default_rng(options.seed))
    write_figure(figure, options, "overview")


if __name__ == "__main__":
    guarded(main)
