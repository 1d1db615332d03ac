"""Noise against entropy, accuracy and mismatch: a figure over sigma, and the effect on entropy by format.

python analysis/fig_sigma.py runs/ --out figures/ --step 1 --sigma 1e-2
"""

from qerl_bench.results.load import load_runs
from qerl_bench.results.noise import SIGMA_FACTORS, entropy_effect, sigma_figure, sigma_table, with_one_sigma
from qerl_bench.results.script import comparable, guarded, parser_for
from qerl_bench.results.style import save


def main(arguments: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--step", type=int, default=1, help="training step to look at (default: 1, before training)")
    parser.add_argument("--sigma", type=float, default=1e-2, help="noise to compare with none (default: 1e-2)")
    options = parser.parse_args(arguments)

    runs = load_runs(options.runs, options.mixed_code)
    table = sigma_table(comparable(with_one_sigma(runs), SIGMA_FACTORS), options.step)
    options.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.out / "sigma.csv", index=False)
    effect = entropy_effect(table, options.sigma)
    effect.to_csv(options.out / "entropy_effect.csv", index=False)
    print(f"entropy (nats/token) at step {options.step}, noise off and on (sigma {options.sigma:g}), 95 % intervals")
    print(effect.to_string(index=False, float_format=lambda value: f"{value:.5f}"))
    print(*save(sigma_figure(table), options.out / "sigma"), sep="\n")


if __name__ == "__main__":
    guarded(main)
