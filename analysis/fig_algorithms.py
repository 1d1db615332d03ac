"""Reward and entropy by training step, one line per algorithm, and a table of held-out gains with standard errors.

python analysis/fig_algorithms.py runs/ --out figures/
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

from qerl_bench.errors import BadInput
from qerl_bench.results.algorithms import figure, gains
from qerl_bench.results.load import find_runs, load_run
from qerl_bench.results.style import save


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write algorithms.pdf, algorithms.png and algorithms.csv.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders that hold runs, or single runs")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder to write to (default: figures)")
    parser.add_argument("--smooth", type=int, default=7, help="steps in the mean around each step, odd (default: 7)")
    options = parser.parse_args(arguments)

    runs = [load_run(run) for folder in options.runs for run in find_runs(folder)]
    for run in runs:
        if not run.finished:
            print(f"{run.name} is not finished and left out", file=sys.stderr)
    finished = [run for run in runs if run.finished]
    table = gains(finished)
    print(*save(figure(finished, options.smooth), options.out / "algorithms"), sep="\n")
    table.to_csv(options.out / "algorithms.csv", index=False)
    with pd.option_context("display.width", 200):
        print(table.to_string(index=False, float_format=lambda value: f"{value:.3f}"))


if __name__ == "__main__":
    try:
        main()
    except BadInput as error:
        print(error, file=sys.stderr)
        sys.exit(2)
