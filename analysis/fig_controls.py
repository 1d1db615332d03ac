"""Is it the noise? BF16 with other sources of entropy or noise, and quantization with AQN, each minus BF16, in pairs.

python analysis/fig_controls.py runs/ --out figures/
"""

from qerl_bench.commands.exits import guarded
from qerl_bench.studies.figures.arms import control_arms
from qerl_bench.studies.figures.effects import dot_plot
from qerl_bench.studies.figures.paired import ENTROPY, REWARD_MEAN, SAMPLED
from qerl_bench.studies.figures.script import read_study, write_figure

FACTORS = ["quant.", "quantizer.", "aqn", "noise", "rollout.temperature", "train.entropy_coef"]
MEASURES = [ENTROPY, REWARD_MEAN, SAMPLED]  # entropy over all steps: the schedules start without noise
NOTE = "Each arm minus BF16 with nothing added."


def main(arguments: list[str] | None = None) -> None:
    study, options = read_study(arguments, __doc__, FACTORS)
    write_figure(dot_plot(control_arms(study.complete_settings()), MEASURES, NOTE), options, "controls")


if __name__ == "__main__":
    guarded(main)
