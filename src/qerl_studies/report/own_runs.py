"""What the page of a study begins with: the contrasts that are in its runs, its arms, and these by step.

Left out: gates, corrections for how many contrasts one looks at, and differences by question, which claims have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any

from qerl_studies.figures.headline import HEADLINES, Compared, Headline, common_cells, compared
from qerl_studies.figures.style import FORMAT_COLORS, OTHER_COLORS, color
from qerl_studies.report.axes import AXES, axis_of
from qerl_studies.report.curve_drawing import DrawnArm, draw
from qerl_studies.runs.load import Run
from qerl_studies.runs.own_contrasts import Levels, OwnContrast, own_contrasts
from qerl_studies.runs.settings import Setting, by_scope, group_by_setting

MOST_ARMS = 8  # of one drawing
CURVES = (
    Headline("reward", "train", "reward/mean", ".2f"),
    Headline("accuracy of rollouts", "train", "accuracy", ".0%"),
    Headline("held-out accuracy, greedy", "eval", "eval/accuracy_greedy", ".0%"),
    Headline("held-out accuracy, greedy, lenient", "eval", "eval/lenient_greedy", ".0%"),
    Headline("entropy, nats per token", "train", "entropy", ".2f"),
)


def own_content(runs: Sequence[Run]) -> dict[str, Any]:
    """What the template takes: for each model and task its contrasts, arms and curves."""
    shown = [one for one in HEADLINES if any(not run.series(one.kind, one.metric).empty for run in runs)]
    return {"headlines": shown, "own": [_of_scope(name, group, shown) for name, group in by_scope(runs).items()]}


def _of_scope(name: str, runs: Sequence[Run], shown: Sequence[Headline]) -> dict[str, Any]:
    settings = group_by_setting(runs)
    arms = drawn_arms(settings)
    curves = [(curve.title, draw(arms[:MOST_ARMS], curve)) for curve in CURVES]
    return {
        "name": name,
        "contrasts": [_contrast(contrast, shown) for contrast in own_contrasts(settings)],
        "arms": [(arm, _levels(arm, shown)) for arm in arms],
        "most": MOST_ARMS,
        "curves": [(title, drawing) for title, drawing in curves if drawing],
    }


def drawn_arms(settings: Sequence[Setting]) -> list[DrawnArm]:
    """The settings, one color each: that of its format for the first of them, before those with noise."""
    formats = {color(one["quant.name"]) for one in settings}
    others = cycle([shade for shade in OTHER_COLORS if shade not in formats])
    named = zip(settings, Levels(settings).names, strict=True)
    arms = []
    for setting, name in sorted(named, key=lambda one: (one[0]["aqn.name"] != "none", one[1])):
        own = color(setting["quant.name"])
        shade = own if own in formats else next(others)
        formats -= {own}
        shade = "var(--text)" if shade == FORMAT_COLORS["bf16"] else shade
        axes = {axis: str(axis_of(setting.runs[0].config_items, key)) for axis, key in AXES.items()}
        arms.append(DrawnArm(name, setting.runs, shade, axes))
    return sorted(arms, key=lambda arm: arm.name)


def _levels(arm: DrawnArm, shown: Sequence[Headline]) -> list[str]:
    cells = {run.cell: run for run in arm.runs}
    return [one.text(one.mean(cells)) for one in shown]


def _contrast(contrast: OwnContrast, shown: Sequence[Headline]) -> dict[str, Any]:
    first, second = contrast.treated.by_cell, contrast.control.by_cell
    common = common_cells(first, second)
    arms = (contrast.treated, contrast.control)
    found = {key: [str(axis_of(arm.runs[0].config_items, key)) for arm in arms] for key in AXES.values()}
    return {
        "factor": contrast.factor,
        "label": contrast.label,
        "where": contrast.where,
        "pairs": len(common),
        "mixed": any(first[cell].block != second[cell].block for cell in common),
        "axes": {axis: [*dict.fromkeys(found[key])] for axis, key in AXES.items()},
        "cells": [_cell(compared(first, second, one)) for one in shown],
    }


def _cell(found: Compared) -> tuple[str, str]:
    """The difference with its interval, and what the interval leaves."""
    if found.difference is None:
        return "-", ""
    scale, digits = (100, 1) if "%" in found.number.form else (1, 3)
    together = "" if math.isnan(found.correlation) else f", correlation {found.correlation:+.2f}"
    return found.difference.text(lambda end: f"{scale * end:+.{digits}f}"), found.state.of_pair + together
