"""Reward by training step: each weight format minus BF16, in pairs.

python analysis/fig_reward.py runs/ --out figures/
"""

from qerl_bench.commands.exits import guarded
from qerl_bench.studies.figures.curves import REWARD, format_curves
from qerl_bench.studies.figures.script import read_study, write_figure


def main(arguments: list[str] | None = None) -> None:
    study, options = read_study(arguments, __doc__, ["quant.", "quantizer."], unfinished=True)
    write_figure(format_curves(study, [REWARD]), options, "reward")


if __name__ == "__main__":
    guarded(main)
