"""Reward and held-out accuracy against LoRA rank, and each rank minus rank 32 in the same format, in pairs.

python analysis/fig_ranks.py runs/ --out figures/
"""

from matplotlib.figure import Figure

from qerl_bench.commands.exits import guarded
from qerl_bench.studies.figures.against import controls_of, plot_against
from qerl_bench.studies.figures.labels import label_settings
from qerl_bench.studies.figures.paired import REWARD_MEAN, SAMPLED
from qerl_bench.studies.figures.script import read_study, write_figure
from qerl_bench.studies.runs.settings import Study

KEY, USUAL = "lora.rank", 32


def main(arguments: list[str] | None = None) -> None:
    study, options = read_study(arguments, __doc__, ["quant.", "quantizer.", KEY, "lora.alpha"])
    write_figure(draw(study), options, "ranks")


def draw(study: Study) -> Figure:
    settings = label_settings(study.complete_settings(), axis=KEY)
    controls = controls_of(settings, KEY, USUAL, same="label")
    alphas = {setting["lora.alpha"] for setting in settings}
    one_alpha = f"LoRA alpha {next(iter(alphas)):g}." if len(alphas) == 1 else ""
    alpha = one_alpha or "LoRA alpha differs with the rank, and so the step."
    return plot_against(settings, KEY, [REWARD_MEAN, SAMPLED], "LoRA rank", controls, f"minus rank {USUAL}", alpha)


if __name__ == "__main__":
    guarded(main)
