"""Is it the noise? BF16 with other sources of entropy or noise, and quantization with AQN, each minus BF16, in pairs.

python analysis/fig_controls.py runs/ --out figures/
"""

from qerl_bench.figures.effects import effect_rows
from qerl_bench.figures.lines import control_lines
from qerl_bench.figures.paired import ENTROPY, REWARD_MEAN, SAMPLED
from qerl_bench.study.script import draw_figure, guarded
from qerl_bench.study.select import arms

FACTORS = ["quant.", "quantizer.", "aqn", "noise", "rollout.temperature", "train.entropy_coef"]
KEYS = ["quant.name", "aqn.name", "aqn.sigma_start", "noise.cadence", *FACTORS[-2:]]
COLUMNS = [ENTROPY, REWARD_MEAN, SAMPLED]  # entropy of all steps: in the first the schedules have no noise yet
NOTE = "Each arm minus BF16 with nothing added."


def main(arguments: list[str] | None = None) -> None:
    draw_figure(
        arguments, __doc__, "controls", FACTORS,
        lambda runs: effect_rows(control_lines(arms(runs, KEYS)), COLUMNS, NOTE),
    )  # fmt: skip


if __name__ == "__main__":
    guarded(main)
