"""Is it the noise? BF16 with other sources of entropy or noise beside quantization and AQN, with intervals over seeds.

python analysis/fig_controls.py runs/ --out figures/
"""

from qerl_bench.results.effects import Column, control_rows, dots, final
from qerl_bench.results.measure import area
from qerl_bench.results.script import draw_figure, guarded
from qerl_bench.results.select import arms

FACTORS = ["quant.", "quantizer.", "aqn", "inject", "rollout.temperature", "optim.entropy_coef"]
KEYS = ["quant.name", "aqn.name", "aqn.sigma_start", "inject.cadence", *FACTORS[-2:]]
COLUMNS = [
    Column("mean entropy", area("entropy")),  # not of the first step: there the schedules have no noise yet
    Column("mean reward", area("reward/mean")),
    Column("held-out, sampled", final("sampled"), True),
]


def main(arguments: list[str] | None = None) -> None:
    draw_figure(arguments, __doc__, "controls", FACTORS, lambda runs: dots(control_rows(arms(runs, KEYS)), COLUMNS))


if __name__ == "__main__":
    guarded(main)
