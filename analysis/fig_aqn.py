"""Noise minus none, in pairs: reward and entropy by training step, one column per weight format.

python analysis/fig_aqn.py runs/ --out figures/
"""

from qerl_bench.figures.curves import ENTROPY, REWARD, noise_curves
from qerl_bench.study.script import draw_figure, guarded
from qerl_bench.study.select import with_one_noise


def main(arguments: list[str] | None = None) -> None:
    draw_figure(
        arguments, __doc__, "aqn", ["quant.", "quantizer.", "aqn.name"],
        lambda runs: noise_curves(with_one_noise(runs), [REWARD, ENTROPY]), unfinished=True,
    )  # fmt: skip


if __name__ == "__main__":
    guarded(main)
