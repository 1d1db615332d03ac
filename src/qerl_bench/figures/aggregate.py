"""Formats over several settings at once, after Agarwal et al. 2021: interquartile mean, probability of improvement over
16-bit weights, and performance profile, each with a stratified bootstrap interval.

A setting (a learning rate with its noise, say) takes the place that a task has there: seeds are drawn anew within each.
Claims are judged setting by setting and in pairs (judge.py); this is the view over all of them, for a reader's eye.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qerl_bench.checks import require
from qerl_bench.claims.contrasts import FORMAT
from qerl_bench.claims.match import Cell
from qerl_bench.figures.paired import by_cell, over_bases, repeated
from qerl_bench.figures.style import GREY, TEXT_WIDTH, PaperFigure, caption, colour, paper_style, percent, place
from qerl_bench.statistics import (
    Resampled,
    interquartile_mean,
    performance_profile,
    require_complete,
    stratified_bootstrap,
)
from qerl_bench.study.load import Run
from qerl_bench.study.select import cell

CONTROL = "bf16"
POINTS = 101  # thresholds of a profile
TELLING = ("model.name", "task.name", "algo.name", "lora.rank", "aqn.name", "rollout.temperature", "steps")


def scores(runs: Sequence[Run], of: Callable[[Run], float]) -> tuple[dict[str, np.ndarray], str]:
    """For each format the number `of` its runs, (units, settings), and what the settings are.

    Settings are those in which every format was run, at the learning rate nearest to the model's own: a mean over rates
    at which runs learn and rates at which they diverge would be one of neither. A unit is a base model, its seeds
    averaged, or a seed where there is a single base. Raises ConfigError if there is no such setting, or if a format lacks
    a base and seed in one, or has it twice.
    """
    settings: dict[str, dict[str, dict[Cell, Run]]] = {}
    for run in runs:
        facts = {key: value for key, value in run.facts.items() if not key.startswith(FORMAT)}
        units = settings.setdefault(repr(sorted(facts.items())), {}).setdefault(run.option("quant.name"), {})
        other = units.setdefault(cell(run), run)
        require(other is run, f"{other.name} and {run.name} are one setting, format and seed: leave one out")
    names = {run.option("quant.name") for run in runs}
    common = [settings[key] for key in sorted(settings) if settings[key].keys() == names]
    require(
        len(names) > 1 and CONTROL in names and bool(common),
        f"no setting was run with each of the formats {', '.join(sorted(names))}, {CONTROL} among them: add what is "
        "missing, or leave the runs of a format out",
    )
    nearest = min(_away(setting) for setting in common)
    common = [setting for setting in common if _away(setting) == nearest]
    wanted = sorted({key for setting in common for group in setting.values() for key in group})
    require_complete(
        {
            f"{next(iter(group.values())).name} of base {base}": [seed for other, seed in group if other == base]
            for setting in common
            for group in setting.values()
            for base in {base for base, _ in wanted}
        }
    )
    found = {}
    for name in sorted(names, key=place):
        runs_of = [[setting[name][key] for key in wanted] for setting in common]
        found[name] = np.stack([over_bases(by_cell(group, of)).to_numpy()[0] for group in runs_of], axis=1)
    return found, _described(common, wanted)


def _away(setting: dict[str, dict[Cell, Run]]) -> float:
    """How far the learning rate of a setting is from its model's own, as a factor."""
    facts = next(iter(setting[CONTROL].values())).facts
    return round(abs(math.log(facts["optim.lr"] / facts.get("model.lr", facts["optim.lr"]))), 6)


def _described(common: Sequence[dict[str, dict[Cell, Run]]], wanted: Sequence[Cell]) -> str:
    firsts = [next(iter(setting[CONTROL].values())) for setting in common]
    values = [{key: run.facts.get(key) for key in TELLING} for run in firsts]
    keys = [key for key in TELLING if len({value[key] for value in values}) > 1]
    said = "; ".join(", ".join(_said(key, value[key]) for key in keys) for value in values)
    several = f"{len(common)} settings ({said})" if keys else "one setting"
    runs = [common[0][CONTROL][key] for key in wanted]
    return f"{several} at learning rate {firsts[0].option('optim.lr'):g}, each of {repeated(runs)}"


def _said(key: str, value: object) -> str:
    if key == "aqn.name":
        return "no noise" if value == "none" else f"AQN {value}"
    return str(value) if key.endswith(".name") else f"{key.split('.')[-1]} {value}"


def chance(differences: np.ndarray) -> float:
    """P(a run beats the one of the control with its seed and base), ties counting half."""
    return float((np.sign(differences) / 2 + 0.5).mean())


def overview(found: dict[str, np.ndarray], settings: str, label: str, generator: np.random.Generator) -> Figure:
    """Interquartile mean and chance of beating BF16 on top, below them a profile per format beside that of BF16.

    `found` and `settings` are those of `scores`, shares between 0 and 1 that `label` names.
    """
    control = found[CONTROL]
    others = [name for name in found if name != CONTROL]
    values = np.concatenate([table.ravel() for table in found.values()])
    thresholds = np.linspace(values.min(), values.max(), POINTS)
    with paper_style():
        figure = PaperFigure(figsize=(TEXT_WIDTH, 1.9 + 0.2 * len(found)))
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(2, 2 * len(others), height_ratios=[0.45 + 0.2 * len(found), 1.3])
        middle, better = (figure.add_subplot(grid[0, part]) for part in (slice(len(others)), slice(len(others), None)))
        profiles = [figure.add_subplot(grid[1, 2 * place : 2 * place + 2]) for place in range(len(others))]
        for height, (name, table) in enumerate(found.items()):
            _dot(middle, height, stratified_bootstrap([table], interquartile_mean, generator), name)
            if name != CONTROL:
                _dot(better, height, stratified_bootstrap([table - control], chance, generator), name)
        better.axvline(0.5, color=GREY, linewidth=0.7, zorder=0.5)
        better.set_xlim(0, 1)
        for ax in (middle, better):
            ax.set_yticks(range(len(found)), [name.upper() for name in found])
            ax.set_ylim(len(found) - 0.4, -0.6)
            ax.grid(axis="y", visible=False)
            ax.tick_params(axis="y", length=0)
        for tick, name in zip(middle.get_yticklabels(), found, strict=True):
            tick.set_color(colour(name))
        better.set_yticklabels([])
        middle.set_xlabel(f"interquartile mean, {label}")
        better.set_xlabel("P(better than BF16 of the same seed)")
        middle.xaxis.set_major_formatter(percent)
        for ax, name in zip(profiles, others, strict=True):
            for one in (CONTROL, name):
                curve = stratified_bootstrap([found[one]], lambda x: performance_profile(x, thresholds), generator)
                shade = colour(one)
                ax.plot(thresholds, curve.value, color=shade, drawstyle="steps-post", label=one.upper(), linewidth=1)
                ax.fill_between(thresholds, curve.low, curve.high, color=shade, alpha=0.12, linewidth=0, step="post")
            ax.set_title(f"{name.upper()} and BF16", color=colour(name))
            ax.set_xlabel("x")
            ax.xaxis.set_major_locator(MaxNLocator(nbins=3))
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_formatter(percent)
            if ax is not profiles[0]:
                ax.set_yticklabels([])
        profiles[0].set_ylabel("share of runs above x")
        caption(
            figure, f"{settings[:1].upper()}{settings[1:]}.",
            "Intervals of 95% by stratified bootstrap." if len(control) > 1 else "A single seed: no interval.",
            f"Bottom: {label}, black is BF16. Axes of accuracy do not begin at 0.",
        )  # fmt: skip
    return figure


def _dot(ax: Axes, height: int, found: Resampled, name: str) -> None:
    reach = [[found.value - found.low], [found.high - found.value]]
    ax.errorbar(
        found.value, height, xerr=reach, fmt="o", color=colour(name), elinewidth=1.1, capsize=0, label=f"_{name}"
    )
