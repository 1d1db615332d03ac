"""Reward and held-out accuracy against the learning rate, and each format minus BF16 at the same rate, in pairs.

python analysis/fig_learning_rates.py runs/ --out figures/
"""

from matplotlib.figure import Figure

from qerl_bench.figures.against import against, same_but
from qerl_bench.figures.paired import REWARD_LATE, SAMPLED
from qerl_bench.study.load import Run
from qerl_bench.study.script import draw_figure, guarded
from qerl_bench.study.select import arms

KEY = "optim.lr"


def main(arguments: list[str] | None = None) -> None:
    draw_figure(arguments, __doc__, "learning_rates", ["quant.", "quantizer.", "optim.lr"], draw)


def draw(runs: list[Run]) -> Figure:
    rows = arms(runs, ["quant.name", "aqn.name", KEY])
    control = same_but(rows, "quant.name", "bf16", KEY)
    return against(rows, KEY, [REWARD_LATE, SAMPLED], "learning rate", control, "minus BF16")


if __name__ == "__main__":
    guarded(main)
