"""Held-out accuracy after training by weight format and noise, with intervals over seeds.

python analysis/fig_accuracy.py runs/ --out figures/
"""

from qerl_bench.results.effects import Column, dots, final, format_rows
from qerl_bench.results.measure import area
from qerl_bench.results.script import draw_figure, guarded
from qerl_bench.results.select import arms, with_one_noise

COLUMNS = [
    Column("held-out, greedy", final("greedy"), True),
    Column("held-out, sampled", final("sampled"), True),
    Column("mean reward", area("reward/mean")),
]


def main(arguments: list[str] | None = None) -> None:
    draw_figure(
        arguments, __doc__, "accuracy", ["quant.", "quantizer.", "aqn.name"],
        lambda runs: dots(format_rows(arms(with_one_noise(runs), ["quant.name", "aqn.name"])), COLUMNS),
    )  # fmt: skip


if __name__ == "__main__":
    guarded(main)
