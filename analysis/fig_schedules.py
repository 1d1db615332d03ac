"""Schedules of the noise: sigma by step, and what training under each came to minus the exponential one, in pairs.

python analysis/fig_schedules.py runs/ --out figures/
"""

from qerl_bench.figures.against import schedules
from qerl_bench.figures.paired import REWARD_LATE, SAMPLED
from qerl_bench.study.script import draw_figure, guarded
from qerl_bench.study.select import arms


def main(arguments: list[str] | None = None) -> None:
    draw_figure(
        arguments, __doc__, "schedules", ["aqn.name"],
        lambda runs: schedules(arms(runs, ["quant.name", "aqn.name"]), [REWARD_LATE, SAMPLED]),
    )  # fmt: skip


if __name__ == "__main__":
    guarded(main)
