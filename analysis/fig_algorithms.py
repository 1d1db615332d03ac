"""Reward and entropy by training step, one line per algorithm, and a table of held-out gains with standard errors.

python analysis/fig_algorithms.py runs/ --out figures/
"""

import sys

import pandas as pd

from qerl_bench.results.algorithms import figure, gains
from qerl_bench.results.load import load_runs
from qerl_bench.results.script import comparable, guarded, parser_for
from qerl_bench.results.style import save

SMOOTH = 7  # steps


def main(arguments: list[str] | None = None) -> None:
    options = parser_for(__doc__).parse_args(arguments)
    runs = load_runs(options.runs, options.mixed_code)
    for run in runs:
        if not run.finished:
            print(f"{run.name} is not finished and left out", file=sys.stderr)
    chosen = comparable([run for run in runs if run.finished], ["algo"])
    table = gains(chosen)
    print(*save(figure(chosen, SMOOTH), options.out / "algorithms"), sep="\n")
    table.to_csv(options.out / "algorithms.csv", index=False)
    with pd.option_context("display.width", 200):
        print(table.to_string(index=False, float_format=lambda value: f"{value:.3f}"))


if __name__ == "__main__":
    guarded(main)
