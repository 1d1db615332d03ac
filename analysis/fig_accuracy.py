"""Held-out accuracy after training: each weight format minus BF16, and noise minus none in each format, in pairs.

python analysis/fig_accuracy.py runs/ --out figures/
"""

from qerl_bench.commands.exits import guarded
from qerl_bench.studies.figures.arms import format_arms
from qerl_bench.studies.figures.effects import dot_plot
from qerl_bench.studies.figures.labels import noise_text
from qerl_bench.studies.figures.paired import GREEDY, REWARD_MEAN, SAMPLED
from qerl_bench.studies.figures.script import read_study, write_figure


def main(arguments: list[str] | None = None) -> None:
    study, options = read_study(arguments, __doc__, ["quant.", "quantizer.", "aqn.name"])
    settings = study.with_one_schedule().complete_settings("quant.name", "aqn.name")
    noise = [f"Noise: {noise_text(one)}." for one in settings if one["aqn.name"] != "none"][:1]
    write_figure(dot_plot(format_arms(settings), [SAMPLED, GREEDY, REWARD_MEAN], *noise), options, "accuracy")


if __name__ == "__main__":
    guarded(main)
