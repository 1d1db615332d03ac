"""Reward by training step: each weight format minus BF16, in pairs.

python analysis/fig_reward.py runs/ --out figures/
"""

from qerl_bench.figures.curves import REWARD, format_curves
from qerl_bench.study.script import draw_figure, guarded


def main(arguments: list[str] | None = None) -> None:
    factors = ["quant.", "quantizer."]
    draw_figure(arguments, __doc__, "reward", factors, lambda runs: format_curves(runs, [REWARD]), unfinished=True)


if __name__ == "__main__":
    guarded(main)
