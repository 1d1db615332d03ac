"""Held-out accuracy after training: each weight format minus BF16, and noise minus none in each format, in pairs.

python analysis/fig_accuracy.py runs/ --out figures/
"""

from matplotlib.figure import Figure

from qerl_bench.figures.effects import effect_rows
from qerl_bench.figures.lines import format_lines
from qerl_bench.figures.paired import GREEDY, REWARD_MEAN, SAMPLED
from qerl_bench.study.load import Run
from qerl_bench.study.naming import noise_of
from qerl_bench.study.script import draw_figure, guarded
from qerl_bench.study.select import arms, with_one_noise


def main(arguments: list[str] | None = None) -> None:
    draw_figure(arguments, __doc__, "accuracy", ["quant.", "quantizer.", "aqn.name"], draw)


def draw(runs: list[Run]) -> Figure:
    rows = arms(with_one_noise(runs), [], crossed=["quant.name", "aqn.name"])
    noise = [f"Noise: {noise_of(row)}." for row in rows if row["aqn.name"] != "none"][:1]
    return effect_rows(format_lines(rows), [SAMPLED, GREEDY, REWARD_MEAN], *noise)


if __name__ == "__main__":
    guarded(main)
