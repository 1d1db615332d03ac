"""Noise on and off: reward and entropy by training step, one column per weight format.

python analysis/fig_aqn.py runs/ --out figures/
"""

from qerl_bench.results.figures import by_format
from qerl_bench.results.load import tidy
from qerl_bench.results.script import draw_figure, guarded
from qerl_bench.results.select import with_one_noise

SMOOTH = 11  # steps


def main(arguments: list[str] | None = None) -> None:
    draw_figure(
        arguments, __doc__, "aqn", ["quant.", "quantizer.", "aqn.name"],
        lambda runs: by_format(tidy(with_one_noise(runs)), ["reward/mean", "entropy"], SMOOTH), unfinished=True,
    )  # fmt: skip


if __name__ == "__main__":
    guarded(main)
