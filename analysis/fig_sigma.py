"""Dose and response: constant noise of each sigma minus none, in pairs, on entropy, reward and accuracy, by format.

python analysis/fig_sigma.py runs/ --out figures/
"""

from qerl_bench.figures.noise import SIGMA_FACTORS, sigma_effects, sigma_figure, sigma_rows, with_one_sigma
from qerl_bench.figures.style import save
from qerl_bench.study.load import load_runs
from qerl_bench.study.script import comparable, figure_parser, guarded


def main(arguments: list[str] | None = None) -> None:
    options = figure_parser(__doc__).parse_args(arguments)
    runs = [run for run in load_runs(options.runs, options.mixed_code) if run.finished]
    rows = sigma_rows(comparable(with_one_sigma(runs), SIGMA_FACTORS))
    effects = sigma_effects(rows)
    options.out.mkdir(parents=True, exist_ok=True)
    effects.to_csv(options.out / "sigma.csv", index=False)
    print(effects.to_string(index=False, float_format=lambda value: f"{value:.4g}"))
    print(*save(sigma_figure(rows), options.out / "sigma", options.formats), sep="\n")


if __name__ == "__main__":
    guarded(main)
