"""Noise schedules: sigma by step, and the result of training with each minus the exponential one, in pairs.

python analysis/fig_schedules.py runs/ --out figures/
"""

from qerl_bench.commands.exits import guarded
from qerl_bench.studies.figures.against import plot_schedules
from qerl_bench.studies.figures.paired import REWARD_LATE, SAMPLED
from qerl_bench.studies.figures.script import read_study, write_figure


def main(arguments: list[str] | None = None) -> None:
    study, options = read_study(arguments, __doc__, ["aqn.name"])
    write_figure(plot_schedules(study.complete_settings(), [REWARD_LATE, SAMPLED]), options, "schedules")


if __name__ == "__main__":
    guarded(main)
