"""Entropy of the policy by training step, as it sampled and with any noise off, one line per weight format.

python analysis/fig_entropy.py runs/ --out figures/
"""

from qerl_bench.results.figures import comparison
from qerl_bench.results.load import tidy
from qerl_bench.results.script import draw_figure, guarded


def main(arguments: list[str] | None = None) -> None:
    draw_figure(
        arguments, __doc__, "entropy", ["quant"],
        lambda runs: comparison(tidy(runs), ["entropy", "entropy_clean"], share_y=True), unfinished=True,
    )  # fmt: skip


if __name__ == "__main__":
    guarded(main)
