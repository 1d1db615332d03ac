"""Entropy of the policy by training step, as it sampled and with any noise off: each weight format over BF16, in pairs.

python analysis/fig_entropy.py runs/ --out figures/
"""

from matplotlib.figure import Figure

from qerl_bench.figures.curves import CLEAN, ENTROPY, format_curves
from qerl_bench.study.load import Run
from qerl_bench.study.script import draw_figure, guarded


def main(arguments: list[str] | None = None) -> None:
    draw_figure(arguments, __doc__, "entropy", ["quant.", "quantizer."], draw, unfinished=True)


def draw(runs: list[Run]) -> Figure:
    noisy = any(run.option("aqn.name") != "none" for run in runs)  # without noise the two are the same
    return format_curves(runs, [ENTROPY, CLEAN] if noisy else [ENTROPY])


if __name__ == "__main__":
    guarded(main)
