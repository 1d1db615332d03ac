"""Reward and accuracy of the rollouts by training step, one line per format and noise, averaged over seeds.

python analysis/fig_reward.py runs/ --out figures/
"""

import argparse
import sys
from pathlib import Path

from qerl_bench.errors import BadInput
from qerl_bench.results.figures import comparison, save
from qerl_bench.results.load import find_runs, load_run, tidy


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw reward and rollout accuracy by step: reward.pdf and reward.png.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders that hold runs, or single runs")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder to write to (default: figures)")
    parser.add_argument("--smooth", type=int, default=11, help="steps in the mean around each step, odd (default: 11)")
    options = parser.parse_args(arguments)

    runs = [load_run(run) for folder in options.runs for run in find_runs(folder)]
    for run in runs:
        if not run.finished:
            print(f"{run.name} is not finished: its setting ends at the step that it has reached", file=sys.stderr)
    figure = comparison(tidy(runs), ["reward/mean", "accuracy"], options.smooth)
    print(*save(figure, options.out / "reward"), sep="\n")


if __name__ == "__main__":
    try:
        main()
    except BadInput as error:
        print(error, file=sys.stderr)
        sys.exit(2)
