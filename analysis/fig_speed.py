"""Speed and memory of steps that trained, by weight format and noise: medians after a run's first tenth, and its peak.

python analysis/fig_speed.py runs/ --out figures/
"""

from matplotlib.figure import Figure

from qerl_bench.claims.measure import largest, typical
from qerl_bench.figures.effects import level_rows
from qerl_bench.figures.lines import all_lines
from qerl_bench.figures.paired import Column, workload
from qerl_bench.study.load import Run
from qerl_bench.study.script import draw_figure, guarded
from qerl_bench.study.select import arms, with_one_noise

COLUMNS = [
    Column("rollout, tokens/s", typical("speed/rollout_tok_s"), ratio=True, level="{:.4g}"),
    Column("step, seconds", typical("time/step_s"), ratio=True, level="{:.3g}"),
    Column("peak memory, GiB", largest("memory/peak_gib"), ratio=True, level="{:.3g}"),
]


def main(arguments: list[str] | None = None) -> None:
    draw_figure(arguments, __doc__, "speed", ["quant.", "quantizer.", "aqn.name"], draw)


def draw(runs: list[Run]) -> Figure:
    chosen = with_one_noise(runs)
    return level_rows(all_lines(arms(chosen, ["quant.name", "aqn.name"])), COLUMNS, workload(chosen[0]))


if __name__ == "__main__":
    guarded(main)
