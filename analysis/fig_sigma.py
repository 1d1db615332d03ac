"""Noise against entropy, accuracy and mismatch: a figure over sigma, and the effect on entropy by format.

python analysis/fig_sigma.py runs/ --out figures/ --step 1 --sigma 1e-2
"""

import argparse
import sys
from pathlib import Path

from qerl_bench.errors import BadInput
from qerl_bench.results.load import find_runs, load_run
from qerl_bench.results.noise import entropy_effect, sigma_figure, sigma_table
from qerl_bench.results.style import save


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write sigma.pdf, sigma.png, sigma.csv and entropy_effect.csv.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders that hold runs with aqn=none and aqn=constant")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder to write to (default: figures)")
    parser.add_argument(
        "--step", type=int, default=1, help="training step to look at (default: 1, before any training)"
    )
    parser.add_argument("--sigma", type=float, default=1e-2, help="noise to compare with none (default: 1e-2)")
    options = parser.parse_args(arguments)

    table = sigma_table([load_run(run) for folder in options.runs for run in find_runs(folder)], options.step)
    options.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.out / "sigma.csv", index=False)
    effect = entropy_effect(table, options.sigma)
    effect.to_csv(options.out / "entropy_effect.csv", index=False)
    print(f"entropy (nats/token) at step {options.step}, noise off and on (sigma {options.sigma:g}), 95 % intervals")
    print(effect.to_string(index=False, float_format=lambda value: f"{value:.5f}"))
    print(*save(sigma_figure(table), options.out / "sigma"), sep="\n")


if __name__ == "__main__":
    try:
        main()
    except BadInput as error:
        print(error, file=sys.stderr)
        sys.exit(2)
