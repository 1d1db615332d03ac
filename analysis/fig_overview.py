"""Formats over all settings that each of them was run in: interquartile mean, chance of beating BF16, and profile.

python analysis/fig_overview.py runs/ --out figures/
"""

import numpy as np

from qerl_bench.figures.aggregate import overview, scores
from qerl_bench.figures.paired import final
from qerl_bench.figures.style import save
from qerl_bench.study.load import load_runs
from qerl_bench.study.script import figure_parser, guarded


def main(arguments: list[str] | None = None) -> None:
    parser = figure_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (default: 0)")
    options = parser.parse_args(arguments)
    runs = [run for run in load_runs(options.runs, options.mixed_code) if run.finished]
    rollouts = [run for run in runs if run.option("algo.name") != "sft" and run.option("eval.name") != "none"]
    found, settings = scores(rollouts, final("sampled"))
    figure = overview(found, settings, "held-out, sampled", np.random.default_rng(options.seed))
    print(*save(figure, options.out / "overview", options.formats), sep="\n")


if __name__ == "__main__":
    guarded(main)
