"""Schedules of the noise: sigma by step, and what training under each came to.

python analysis/fig_schedules.py runs/ --out figures/
"""

from qerl_bench.results.effects import Column, final, schedules
from qerl_bench.results.measure import area
from qerl_bench.results.script import draw_figure, guarded
from qerl_bench.results.select import arms

COLUMNS = [Column("mean reward", area("reward/mean")), Column("held-out, sampled", final("sampled"), True)]


def main(arguments: list[str] | None = None) -> None:
    draw_figure(
        arguments, __doc__, "schedules", ["aqn.name"],
        lambda runs: schedules(arms(runs, ["quant.name", "aqn.name"]), COLUMNS),
    )  # fmt: skip


if __name__ == "__main__":
    guarded(main)
