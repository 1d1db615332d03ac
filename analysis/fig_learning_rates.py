"""Reward and held-out accuracy against the learning rate, and each format minus BF16 at the same rate, in pairs.

python analysis/fig_learning_rates.py runs/ --out figures/
"""

from qerl_bench.commands.exits import guarded
from qerl_bench.studies.figures.against import controls_of, plot_against
from qerl_bench.studies.figures.labels import label_settings
from qerl_bench.studies.figures.paired import REWARD_LATE, SAMPLED
from qerl_bench.studies.figures.script import read_study, write_figure

KEY = "optim.lr"


def main(arguments: list[str] | None = None) -> None:
    study, options = read_study(arguments, __doc__, ["quant.", "quantizer.", KEY])
    settings = label_settings(study.complete_settings(), axis=KEY)
    controls = controls_of(settings, "quant.name", "bf16", same=KEY)
    figure = plot_against(settings, KEY, [REWARD_LATE, SAMPLED], "learning rate", controls, "minus BF16")
    write_figure(figure, options, "learning_rates")


if __name__ == "__main__":
    guarded(main)
