"""Dose and response: constant noise of each sigma minus none, in pairs, on entropy, reward and accuracy, by format.

python analysis/fig_sigma.py runs/ --out figures/
"""

from qerl_bench.commands.exits import guarded
from qerl_bench.studies.figures.noise import (
    SIGMA_FACTORS,
    sigma_doses,
    sigma_effects,
    sigma_figure,
    with_constant_sigma,
)
from qerl_bench.studies.figures.script import figure_parser, parse, select, write_figure
from qerl_bench.studies.runs.comparable import load_runs


def main(arguments: list[str] | None = None) -> None:
    options = parse(figure_parser(__doc__), arguments)
    runs = [run for run in load_runs(options.runs, options.mixed_code, options.without) if run.finished]
    doses = sigma_doses(select(with_constant_sigma(runs), SIGMA_FACTORS))
    effects = sigma_effects(doses)
    options.out.mkdir(parents=True, exist_ok=True)
    effects.to_csv(options.out / "sigma.csv", index=False)
    print(effects.to_string(index=False, float_format=lambda value: f"{value:.4g}"))
    write_figure(sigma_figure(doses), options, "sigma")


if __name__ == "__main__":
    guarded(main)
