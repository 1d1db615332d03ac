"""Formats over several settings at once, after Agarwal et al. 2021: interquartile mean, probability of improvement over
16-bit weights, and performance profile, each with a stratified bootstrap interval.

A setting (a learning rate with its noise, say) takes the place that a task has there: seeds are drawn anew within each.
Claims are judged setting by setting and in pairs (judge.py); this is the view over all of them, for a reader's eye.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from qerl_bench.errors import require
from qerl_bench.results.contrasts import FORMAT
from qerl_bench.results.load import Run
from qerl_bench.results.match import facts_of
from qerl_bench.results.stats import (
    Resampled,
    interquartile_mean,
    performance_profile,
    probability_of_improvement,
    require_complete,
    stratified_bootstrap,
)
from qerl_bench.results.style import FORMAT_COLOURS, colour, panels, paper_style

CONTROL = "bf16"
POINTS = 101  # thresholds of a profile


def scores(runs: Sequence[Run], of: Callable[[Run], float]) -> dict[str, np.ndarray]:
    """For each format the number `of` its runs, (seeds, settings), over the settings in which every format was run.

    Raises BadInput if there is no such setting, or if a format lacks a seed in one, or has it twice.
    """
    settings: dict[str, dict[str, dict[int, Run]]] = {}
    for run in runs:
        shared = repr(sorted((key, value) for key, value in facts_of(run).items() if not key.startswith(FORMAT)))
        seeds = settings.setdefault(shared, {}).setdefault(run.option("quant.name"), {})
        other = seeds.setdefault(run.option("seed"), run)
        require(other is run, f"{other.name} and {run.name} are one setting, format and seed: leave one out")
    names = {run.option("quant.name") for run in runs}
    common = [settings[key] for key in sorted(settings) if settings[key].keys() == names]
    require(
        len(names) > 1 and CONTROL in names and bool(common),
        f"no setting was run with each of the formats {', '.join(sorted(names))}, {CONTROL} among them: add what is "
        "missing, or leave the runs of a format out",
    )
    groups = [group for setting in common for group in setting.values()]
    require_complete({f"the setting of {next(iter(group.values())).name}": [*group] for group in groups})
    order = sorted(names, key=lambda name: [*FORMAT_COLOURS, name].index(name))
    return {
        name: np.array([[of(setting[name][seed]) for setting in common] for seed in sorted(common[0][name])])
        for name in order
    }


def overview(found: dict[str, np.ndarray], label: str, generator: np.random.Generator) -> Figure:
    """One panel for each statistic; `found` is that of `scores`, shares between 0 and 1 that `label` names."""
    (seeds, settings), control = next(iter(found.values())).shape, found[CONTROL]
    values = np.concatenate([table.ravel() for table in found.values()])
    thresholds = np.linspace(values.min(), values.max(), POINTS)
    with paper_style():
        figure, axes = panels(1, 3, 1.9)
        middle, better, profile = axes[0]
        for place, (name, table) in enumerate(found.items()):
            _dot(middle, place, stratified_bootstrap([table], interquartile_mean, generator), name)
            if name != CONTROL:
                improved = stratified_bootstrap([table, control], probability_of_improvement, generator)
                _dot(better, place, improved, name)
            curve = stratified_bootstrap([table], lambda x: performance_profile(x, thresholds), generator)
            profile.plot(thresholds, curve.value, color=colour(name), drawstyle="steps-post", label=name.upper())
            profile.fill_between(thresholds, curve.low, curve.high, color=colour(name), alpha=0.12, linewidth=0)
        better.axvline(0.5, color="#BBBBBB", linewidth=0.6, zorder=0.5)
        better.set_xlim(0, 1)
        for ax in (middle, better):
            ax.set_yticks(range(len(found)), [name.upper() for name in found])
            ax.set_ylim(len(found) - 0.4, -0.6)
            ax.grid(axis="y", visible=False)
        better.set_yticklabels([])
        middle.set_xlabel(f"interquartile mean,\n{label}")
        better.set_xlabel("P(a run beats one\nof BF16)")
        profile.set_xlabel(f"x:\n{label}")
        profile.set_ylabel("share of runs above x")
        for axis in (middle.xaxis, profile.xaxis, profile.yaxis):
            axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        what = f"{seeds} seed{'s' if seeds > 1 else ''} in each of {settings} setting{'s' if settings > 1 else ''}"
        figure.suptitle(f"{what}, bootstrap intervals of 95%" if seeds > 1 else f"{what}: no interval")
    return figure


def _dot(ax: Axes, place: int, found: Resampled, name: str) -> None:
    reach = [[found.value - found.low], [found.high - found.value]]
    ax.errorbar(found.value, place, xerr=reach, fmt="o", color=colour(name), elinewidth=1, label=f"_{name}")
