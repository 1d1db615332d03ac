"""Speed and memory by weight format and noise: medians after the first tenth of a run, and its peak.

python analysis/fig_speed.py runs/ --out figures/
"""

from qerl_bench.results.effects import Column, dots, format_rows
from qerl_bench.results.measure import largest, typical
from qerl_bench.results.script import draw_figure, guarded
from qerl_bench.results.select import arms, with_one_noise

COLUMNS = [
    Column("rollout, tokens/s", typical("speed/rollout_tok_s")),
    Column("step, seconds", typical("time/step_s")),
    Column("peak memory, GiB", largest("memory/peak_gib")),
]


def main(arguments: list[str] | None = None) -> None:
    draw_figure(
        arguments, __doc__, "speed", ["quant.", "quantizer.", "aqn.name"],
        lambda runs: dots(format_rows(arms(with_one_noise(runs), ["quant.name", "aqn.name"])), COLUMNS),
    )  # fmt: skip


if __name__ == "__main__":
    guarded(main)
