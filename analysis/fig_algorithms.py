"""Reward and entropy against completions sampled, by algorithm, and a table of held-out gains with standard errors.

python analysis/fig_algorithms.py runs/ --out figures/
"""

import sys

import pandas as pd

from qerl_bench.checks import ConfigError
from qerl_bench.exits import guarded
from qerl_bench.figures.algorithms import algorithm_curves, gain_table
from qerl_bench.figures.script import read_study, write_figure

SMOOTH = 7  # steps


def main(arguments: list[str] | None = None) -> None:
    study, options = read_study(arguments, __doc__, ["algo"])
    write_figure(algorithm_curves(study, SMOOTH), options, "algorithms")
    try:
        table = gain_table(study)
    except ConfigError as reason:
        print(f"no table of gains: {reason}", file=sys.stderr)
        return
    table.to_csv(options.out / "algorithms.csv", index=False)
    with pd.option_context("display.width", 200):
        print(table.to_string(index=False, float_format=lambda value: f"{value:.3f}"))


if __name__ == "__main__":
    guarded(main)
