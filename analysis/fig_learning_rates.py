"""Learning rate against reward and held-out accuracy, one line per weight format.

python analysis/fig_learning_rates.py runs/ --out figures/
"""

from qerl_bench.results.effects import Column, against, final
from qerl_bench.results.measure import area
from qerl_bench.results.script import draw_figure, guarded
from qerl_bench.results.select import arms

KEY = "optim.lr"
COLUMNS = [Column("mean reward", area("reward/mean")), Column("held-out, sampled", final("sampled"), True)]


def main(arguments: list[str] | None = None) -> None:
    draw_figure(
        arguments, __doc__, "learning_rates", ["quant.", "quantizer.", "optim.lr"],
        lambda runs: against(arms(runs, ["quant.name", "aqn.name", KEY]), KEY, COLUMNS, "learning rate"),
    )  # fmt: skip


if __name__ == "__main__":
    guarded(main)
