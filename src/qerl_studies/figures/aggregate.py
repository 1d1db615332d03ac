"""Formats over several settings at once, after Agarwal et al. 2021: interquartile mean, probability of improvement over
16-bit weights, and performance profile, each with a stratified bootstrap interval.

Settings (a learning rate with its noise, say) take the place of their tasks, so seeds are drawn anew within each
setting. Claims are evaluated within one setting (qerl_studies/claims/evaluate.py); this is an overview.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qerl_core.checks import require
from qerl_studies.effects.pairs import average_seeds, by_cell
from qerl_studies.figures.effects import label_rows
from qerl_studies.figures.style import (
    GRAY,
    TEXT_WIDTH,
    PaperFigure,
    caption,
    color,
    format_order,
    inches,
    paper_style,
    percent,
)
from qerl_studies.runs.load import Cell, Run
from qerl_studies.runs.resampling import (
    Resampled,
    interquartile_mean,
    performance_profile,
    probability_of_improvement,
    stratified_bootstrap,
)
from qerl_studies.runs.settings import (
    Setting,
    describe_repeats,
    gaps,
    group_by_setting,
    rate_distance,
    require_complete,
)

CONTROL = "bf16"
FORMAT = ("quant.", "quantizer.")  # how config keys of a format begin
PROFILE_POINTS = 101
DESCRIBED = ("model.name", "task.name", "algo.name", "lora.rank", "aqn.name", "rollout.temperature", "steps")


def scores(runs: Sequence[Run], metric: Callable[[Run], float]) -> tuple[dict[str, np.ndarray], str]:
    """For each format the metric of its runs, (units, settings), and a description of the settings.

    Used are the settings in which every format was run, at the learning rate closest to the model's default: a mean
    over rates at which runs learn and at which they diverge would describe neither. A unit is a base model with its
    seeds averaged, or a seed if there is one base. Raises ConfigError if there is no such setting, or if a format lacks
    a base and seed in one or has it twice.
    """
    groups: dict[frozenset[tuple[str, str]], dict[str, Setting]] = {}  # formats that differ in nothing else
    for setting in group_by_setting(runs):
        rest = frozenset(item for item in setting.runs[0].setting_items if not item[0].startswith(FORMAT))
        other = groups.setdefault(rest, {}).setdefault(setting["quant.name"], setting)
        pair = f"{other.runs[0].name} and {setting.runs[0].name}"
        require(other is setting, f"{pair} are one format in one setting, packed in two ways: leave one out")
    names = {run.option("quant.name") for run in runs}
    common = [groups[rest] for rest in sorted(groups, key=sorted) if groups[rest].keys() == names]
    require(
        len(names) > 1 and CONTROL in names and bool(common),
        f"no setting was run with each of the formats {', '.join(sorted(names))}, {CONTROL} among them: add what is "
        "missing, or leave the runs of a format out",
    )
    nearest = min(_distance(group) for group in common)
    common = [group for group in common if _distance(group) == nearest]
    settings = [setting for group in common for setting in group.values()]
    require_complete(gaps(settings))
    cells = sorted(settings[0].by_cell)
    tables = {}
    for name in sorted(names, key=format_order):
        columns = [average_seeds(by_cell(group[name].runs, metric)).to_numpy()[0] for group in common]
        tables[name] = np.stack(columns, axis=1)
    return tables, _describe(common, cells)


def _distance(group: dict[str, Setting]) -> float:
    return round(rate_distance(group[CONTROL].runs[0]), 6)


def _describe(common: Sequence[dict[str, Setting]], cells: Sequence[Cell]) -> str:
    controls = [group[CONTROL] for group in common]
    keys = [key for key in DESCRIBED if len({_value_text(key, setting) for setting in controls}) > 1]
    values = "; ".join(", ".join(_value_text(key, setting) for key in keys) for setting in controls)
    several = f"{len(common)} settings ({values})" if keys else "one setting"
    repeats = describe_repeats([controls[0].by_cell[cell] for cell in cells])
    return f"{several} at learning rate {controls[0]['optim.lr']:g}, each of {repeats}"


def _value_text(key: str, setting: Setting) -> str:
    if key == "aqn.name":
        return "no noise" if setting.noise == "none" else f"AQN {setting.noise}"
    return str(setting[key]) if key.endswith(".name") else f"{key.split('.')[-1]} {setting[key]}"


def overview(tables: dict[str, np.ndarray], settings: str, label: str, generator: np.random.Generator) -> Figure:
    """Interquartile mean and probability of beating BF16; below them the profile of each format, and of BF16.

    `tables` and `settings` are from `scores`; the scores are shares between 0 and 1, and `label` names them.
    """
    control = tables[CONTROL]
    others = [name for name in tables if name != CONTROL]
    values = np.concatenate([table.ravel() for table in tables.values()])
    thresholds = np.linspace(values.min(), values.max(), PROFILE_POINTS)
    with paper_style():
        figure = PaperFigure(figsize=inches(TEXT_WIDTH, 1.9 + 0.2 * len(tables), len(others)))
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(2, 2 * len(others), height_ratios=[0.45 + 0.2 * len(tables), 1.3])
        middle, better = (figure.add_subplot(grid[0, part]) for part in (slice(len(others)), slice(len(others), None)))
        profiles = [figure.add_subplot(grid[1, 2 * column : 2 * column + 2]) for column in range(len(others))]
        for height, (name, table) in enumerate(tables.items()):
            _dot(middle, height, stratified_bootstrap(table, interquartile_mean, generator), name)
            if name != CONTROL:
                _dot(better, height, stratified_bootstrap(table - control, probability_of_improvement, generator), name)
        better.axvline(0.5, color=GRAY, linewidth=0.7, zorder=0.5)
        better.set_xlim(-0.03, 1.03)  # a whole dot at either end
        for ax in (middle, better):
            label_rows(ax, [name.upper() for name in tables])
        for tick, name in zip(middle.get_yticklabels(), tables, strict=True):
            tick.set_color(color(name))
        better.set_yticklabels([])
        middle.set_xlabel(f"interquartile mean, {label}")
        better.set_xlabel("P(better than its paired BF16)")
        middle.xaxis.set_major_formatter(percent)
        for ax, name in zip(profiles, others, strict=True):
            for one in (CONTROL, name):
                curve = stratified_bootstrap(tables[one], lambda x: performance_profile(x, thresholds), generator)
                shade = color(one)
                ax.plot(thresholds, curve.value, color=shade, drawstyle="steps-post", label=one.upper(), linewidth=1)
                ax.fill_between(thresholds, curve.low, curve.high, color=shade, alpha=0.12, linewidth=0, step="post")
            ax.set_title(f"{name.upper()} and BF16", color=color(name))
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


def _dot(ax: Axes, height: int, statistic: Resampled, name: str) -> None:
    reach = [[statistic.value - statistic.low], [statistic.high - statistic.value]]
    ax.errorbar(
        statistic.value, height, xerr=reach, fmt="o", color=color(name), elinewidth=1.1, capsize=0, label=f"_{name}"
    )
