"""Reward and accuracy of the rollouts by training step, one line per weight format.

python analysis/fig_reward.py runs/ --out figures/
"""

from qerl_bench.results.figures import comparison
from qerl_bench.results.load import tidy
from qerl_bench.results.script import draw_figure, guarded

SMOOTH = 11  # steps


def main(arguments: list[str] | None = None) -> None:
    draw_figure(
        arguments, __doc__, "reward", ["quant.", "quantizer."],
        lambda runs: comparison(tidy(runs), ["reward/mean", "accuracy"], SMOOTH), unfinished=True,
    )  # fmt: skip


if __name__ == "__main__":
    guarded(main)
