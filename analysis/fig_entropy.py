"""Entropy of the policy by training step, with the noise that sampled in place and without it.

python analysis/fig_entropy.py runs/ --out figures/
"""

import argparse
import sys
from pathlib import Path

from qerl_bench.errors import BadInput
from qerl_bench.results.figures import comparison, save
from qerl_bench.results.load import find_runs, load_run, tidy


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw entropy by step: entropy.pdf and entropy.png.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders that hold runs, or single runs")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder to write to (default: figures)")
    parser.add_argument("--smooth", type=int, default=1, help="steps in the mean around each step, odd (default: 1)")
    options = parser.parse_args(arguments)

    runs = [load_run(run) for folder in options.runs for run in find_runs(folder)]
    for run in runs:
        if not run.finished:
            print(f"{run.name} is not finished: its setting ends at the step that it has reached", file=sys.stderr)
    figure = comparison(tidy(runs), ["entropy", "entropy_clean"], options.smooth, share_y=True)
    print(*save(figure, options.out / "entropy"), sep="\n")


if __name__ == "__main__":
    try:
        main()
    except BadInput as error:
        print(error, file=sys.stderr)
        sys.exit(2)
