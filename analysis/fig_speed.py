"""Speed and memory of steps that trained, by weight format and noise: medians after a run's first tenth, and its peak.

python analysis/fig_speed.py runs/ --out figures/
"""

from matplotlib.figure import Figure

from qerl_bench.commands.exits import guarded
from qerl_bench.studies.figures.arms import all_arms
from qerl_bench.studies.figures.effects import level_plot
from qerl_bench.studies.figures.paired import workload
from qerl_bench.studies.figures.script import read_study, write_figure
from qerl_bench.studies.runs.measure import Measure, median_after_warmup, peak
from qerl_bench.studies.runs.settings import Study

MEASURES = [
    Measure("rollout, tokens/s", median_after_warmup("speed/rollout_tok_s"), ratio=True, level_format="{:.4g}"),
    Measure("step, seconds", median_after_warmup("time/step_s"), ratio=True, level_format="{:.3g}"),
    Measure("peak memory, GiB", peak("memory/peak_gib"), ratio=True, level_format="{:.3g}"),
]


def main(arguments: list[str] | None = None) -> None:
    study, options = read_study(arguments, __doc__, ["quant.", "quantizer.", "aqn.name"])
    write_figure(draw(study.with_one_schedule()), options, "speed")


def draw(study: Study) -> Figure:
    return level_plot(all_arms(study.complete_settings()), MEASURES, workload(study.runs[0]))


if __name__ == "__main__":
    guarded(main)
