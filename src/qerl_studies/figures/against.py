"""Differences between schedules, beside their noise by step; and differences over a numeric option such as the rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from qerl_core.checks import require
from qerl_studies.effects.pairs import mean_of_runs
from qerl_studies.figures.effects import draw_dots, draw_effect, margin_note, mark_notes, plotted_arm
from qerl_studies.figures.labels import sigma_by_step
from qerl_studies.figures.paired import interval_note
from qerl_studies.figures.style import (
    OTHER_COLORS,
    caption,
    color,
    label_axes,
    label_ends,
    margin_band,
    panels,
    paper_style,
    percent,
)
from qerl_studies.runs.measure import Measure
from qerl_studies.runs.settings import Setting

SCHEDULES = ("none", "linear", "cosine", "log")  # each is compared with exp


def plot_schedules(settings: Sequence[Setting], measures: Sequence[Measure]) -> Figure:
    """Sigma by step of each schedule, and a panel per measure: each minus exp. Other kinds of noise are left out."""
    by_name = {setting["aqn.name"]: setting for setting in settings}
    names = [name for name in ("exp", *SCHEDULES) if name in by_name]
    require("exp" in names and len(names) > 1, "schedules are compared with aqn=exp: add its runs")
    exp = by_name["exp"]
    shades = dict(zip(names, OTHER_COLORS, strict=False))
    arms = [plotted_arm(exp, "exp (control)", None, shades["exp"])]
    arms += [plotted_arm(by_name[name], name, exp, shades[name]) for name in names[1:]]
    with paper_style():
        figure, axes = panels(1, 1 + len(measures), 1.45)
        left, *others = axes[0]
        for arm in arms:
            sigma = sigma_by_step(arm.runs[0])
            left.plot(sigma.index, sigma, drawstyle="steps-mid", color=arm.shade, linewidth=1.2, label=arm.label)
        label_axes(left, "aqn/sigma")
        left.xaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
        draw_dots(others, arms, measures)
        for ax in others[1:]:
            ax.set_yticklabels([])
        kept = ", as it was put in with seed 0" if exp.runs[0].series("train", "aqn/sigma").empty else ""
        caption(
            figure, f"Left: noise of each schedule{exp.noise.removeprefix('exp')}{kept}. Right: each minus exp, on "
            f"{exp['quant.name'].upper()}.",
            *mark_notes(arms, measures),
        )  # fmt: skip
    return figure


def plot_against(
    settings: Sequence[Setting],
    key: str,
    measures: Sequence[Measure],
    label: str,
    controls: Mapping[Setting, Setting],
    minus: str,
    *notes: str,
) -> Figure:
    """Means of each format against the numeric config key `key`, on a logarithmic axis, and differences below them.

    The settings have labels, without the axis `key`. `controls` has the one that each is compared with, and none for a
    control; `minus` names it. Points of several formats at one value are drawn side by side in the lower panels, and
    are not joined. Raises ConfigError if a format has two settings at one value, or if no format has two values.
    """
    by_label: dict[str, list[Setting]] = {setting.label: [] for setting in settings}
    for setting in sorted(settings, key=lambda one: one[key]):
        by_label[setting.label].append(setting)
    for name, group in by_label.items():
        values = [setting[key] for setting in group]
        require(len(set(values)) == len(values), f"several settings of {name} have one value of {key}: {values}")
    several = max(map(len, by_label.values()))
    require(several > 1, f"no format was run with two values of {key}: there is nothing to draw against it. Add runs")
    mixed = len({setting["aqn.name"] for setting in settings}) > 1
    values = sorted({setting[key] for setting in settings})
    offset = 0.045 * np.log(values[-1] / values[0])
    tens = 10.0 ** np.floor(np.log10(values[0])) if values[0] < 0.01 else 1.0  # learning rates have long labels
    arms = {one: plotted_arm(one, one.label, controls.get(one)) for one in settings}
    with paper_style():
        figure, axes = panels(2, len(measures), 3.0, sharex=True)
        for (top, bottom), measure in zip(axes.T, measures, strict=True):
            ends = []
            margin_band(bottom, *measure.band, "y")
            for name, group in by_label.items():
                shade = color(group[0]["quant.name"])
                means = [mean_of_runs(setting.runs, measure.number) for setting in group]
                top.plot([one[key] for one in group], means, "o-", color=shade, linewidth=0.7, markersize=3, label=name)
                ends.append((means[-1], name, shade))
                for setting in group:
                    if arms[setting].control:
                        side_by_side = [o.label for o in settings if o[key] == setting[key] and arms[o].control]
                        place = side_by_side.index(name) - (len(side_by_side) - 1) / 2
                        arm = replace(arms[setting], filled=arms[setting].filled or not mixed)
                        draw_effect(bottom, setting[key] * np.exp(offset * place), arm, measure, along="y")
            top.set_title(measure.name)
            if "%" in measure.level_format:
                top.yaxis.set_major_formatter(percent)
            top.set_xscale("log")
            bottom.set_xticks(values, [f"{value / tens:.3g}" for value in values])
            bottom.xaxis.set_minor_locator(NullLocator())
            bottom.set_xlabel(label if tens == 1 else f"{label} ($\\times 10^{{{np.log10(tens):.0f}}}$)")
            bottom.set_ylabel(f"{minus}{f', {measure.unit}' if measure.unit else ''}")
            label_ends(top, ends)
        note = f"Top: means (axes not from 0). Bottom: each {minus}; formats at one value stand side by side."
        together, diverged = mark_notes([*arms.values()], measures)[-2:]
        told = (interval_note(settings[0].runs, measures), margin_note(measures), together, diverged)
        caption(figure, *notes, note, *told)
    return figure


def controls_of(settings: Sequence[Setting], key: str, usual: object, same: str) -> dict[Setting, Setting]:
    """For `plot_against`: each setting's control has the value `usual` of `key`, and the same value of `same`, a config
    key or "label". Raises ConfigError, naming them, if settings have no control.
    """

    def shared(setting: Setting) -> Any:
        return setting.label if same == "label" else setting[same]

    controls = {shared(one): one for one in settings if one[key] == usual}
    alone = [one.runs[0].name for one in settings if shared(one) not in controls]
    require(not alone, f"{', '.join(alone)}: no run with {key}={usual} to compare with. Run it too, or leave these out")
    return {one: controls[shared(one)] for one in settings if one[key] != usual}
