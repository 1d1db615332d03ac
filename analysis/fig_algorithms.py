"""Reward and entropy against completions sampled, by algorithm, and a table of held-out gains with standard errors.

python analysis/fig_algorithms.py runs/ --out figures/
"""

import sys

import pandas as pd

from qerl_bench.checks import ConfigError
from qerl_bench.figures.algorithms import figure, gains
from qerl_bench.figures.style import save
from qerl_bench.study.load import load_runs
from qerl_bench.study.script import comparable, figure_parser, guarded

SMOOTH = 7  # steps


def main(arguments: list[str] | None = None) -> None:
    options = figure_parser(__doc__).parse_args(arguments)
    runs = load_runs(options.runs, options.mixed_code)
    for run in runs:
        if not run.finished:
            print(f"{run.name} is not finished and left out", file=sys.stderr)
    chosen = comparable([run for run in runs if run.finished], ["algo"])
    print(*save(figure(chosen, SMOOTH), options.out / "algorithms", options.formats), sep="\n")
    try:
        table = gains(chosen)
    except ConfigError as reason:
        print(f"no table of gains: {reason}", file=sys.stderr)
        return
    table.to_csv(options.out / "algorithms.csv", index=False)
    with pd.option_context("display.width", 200):
        print(table.to_string(index=False, float_format=lambda value: f"{value:.3f}"))


if __name__ == "__main__":
    guarded(main)
