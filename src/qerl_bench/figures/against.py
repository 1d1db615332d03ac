"""Figures of differences against something: schedules with their noise by step, ranks and rates on an axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from qerl_bench.checks import require
from qerl_bench.figures.effects import draw_effect, draw_rows, line, margins, marks
from qerl_bench.figures.paired import Column, by_cell, interval_note, over_bases
from qerl_bench.figures.style import (
    BAND,
    GREY,
    OTHER_COLOURS,
    caption,
    colour,
    label_axes,
    label_ends,
    panels,
    paper_style,
    percent,
)
from qerl_bench.study.naming import format_rows, sigma_of
from qerl_bench.study.select import Row

SCHEDULES = ("none", "linear", "cosine", "log")  # each is compared with exp


def schedules(rows: Sequence[Row], columns: Sequence[Column]) -> Figure:
    """Sigma by step of each schedule, and a panel per column: each minus exp. Other kinds of noise are left out."""
    own = {row["aqn.name"]: row for row in rows}
    require("exp" in own and len(own.keys() & set(SCHEDULES)) > 0, "schedules are compared with aqn=exp: add its runs")
    names = [name for name in ("exp", *SCHEDULES) if name in own]
    shades = dict(zip(names, OTHER_COLOURS, strict=False))
    lines = [line(own["exp"], "exp (control)", None, shades["exp"])]
    lines += [line(own[name], name, own["exp"], shades[name]) for name in names[1:]]
    with paper_style():
        figure, axes = panels(1, 1 + len(columns), 1.45)
        left, *others = axes[0]
        for one in lines:
            sigma = sigma_of(one.runs[0])
            left.plot(sigma.index, sigma, drawstyle="steps-mid", color=one.shade, linewidth=1.2, label=one.label)
        label_axes(left, "aqn/sigma")
        left.xaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
        draw_rows(others, lines, columns)
        for ax in others[1:]:
            ax.set_yticklabels([])
        kept = ", as it was put in with seed 0" if own["exp"]["runs"][0].series("train", "aqn/sigma").empty else ""
        caption(
            figure, f"Left: noise of each schedule{kept}. Right: each minus exp, on {rows[0]['quant.name'].upper()}.",
            *marks(lines, columns),
        )  # fmt: skip
    return figure


def against(
    rows: Sequence[Row],
    key: str,
    columns: Sequence[Column],
    label: str,
    control: Callable[[Row], Row | None],
    minus: str,
    *notes: str,
) -> Figure:
    """Levels of each format against the numeric config key `key`, on a logarithmic axis, and differences below them.

    `control` gives the row that a row is compared with, None for a control itself; `minus` names it. Points of several
    formats at one value stand beside each other in the lower panels, and are not joined. Raises ConfigError if a format
    has two settings at one value, if no format has two values, or if a row's control is missing.
    """
    labelled = format_rows(rows, axis=key)
    by_label: dict[str, list[Row]] = {}
    for row in sorted(labelled, key=lambda row: row[key]):
        by_label.setdefault(row["label"], []).append(row)
    by_label = {row["label"]: by_label[row["label"]] for row in labelled}
    for name, own in by_label.items():
        found = [row[key] for row in own]
        require(len(set(found)) == len(found), f"several settings of {name} have one value of {key}: {found}")
    several = max(map(len, by_label.values()))
    require(several > 1, f"no format was run with two values of {key}: there is nothing to draw against it. Add runs")
    mixed = len({row["aqn.name"] for row in labelled}) > 1
    values = sorted({row[key] for row in labelled})
    step = 0.045 * np.log(values[-1] / values[0])
    tens = 10.0 ** np.floor(np.log10(values[0])) if values[0] < 0.01 else 1.0  # rates stand close to each other
    with paper_style():
        figure, axes = panels(2, len(columns), 3.0, sharex=True)
        for (top, bottom), column in zip(axes.T, columns, strict=True):
            ends = []
            bottom.axhspan(column.shown(-column.margin), column.shown(column.margin), color=BAND, linewidth=0, zorder=0)
            bottom.axhline(0, color=GREY, linewidth=0.7, zorder=1)
            for name, own in by_label.items():
                shade = colour(own[0]["quant.name"])
                means = [float(over_bases(by_cell(row["runs"], column.of)).to_numpy().mean()) for row in own]
                top.plot([row[key] for row in own], means, "o-", color=shade, linewidth=0.7, markersize=3, label=name)
                ends.append((means[-1], name, shade))
                for row in own:
                    other = control(row)
                    if other is not None:
                        there = [one["label"] for one in labelled if one[key] == row[key] and control(one) is not None]
                        aside = np.exp(step * (there.index(name) - (len(there) - 1) / 2))
                        one = line(row, name, other)
                        one = replace(one, filled=one.filled or not mixed)
                        draw_effect(bottom, row[key] * aside, one, column, along="y")
            top.set_title(column.label)
            if "%" in column.level:
                top.yaxis.set_major_formatter(percent)
            top.set_xscale("log")
            bottom.set_xticks(values, [f"{value / tens:.3g}" for value in values])
            bottom.xaxis.set_minor_locator(NullLocator())
            bottom.set_xlabel(label if tens == 1 else f"{label} ($\\times 10^{{{np.log10(tens):.0f}}}$)")
            bottom.set_ylabel(f"{minus}{f', {column.unit}' if column.unit else ''}")
            label_ends(top, ends)
        lines = [line(row, "", control(row)) for row in labelled]
        note = f"Top: means (axes not from 0). Bottom: each {minus}; formats at one value stand side by side."
        caption(figure, *notes, note, interval_note(labelled[0]["runs"]), margins(columns), *marks(lines, columns)[-1:])
    return figure


def same_but(rows: Sequence[Row], key: str, usual: object, same: str) -> Callable[[Row], Row | None]:
    """For `against`: the control of a row is that with the value `usual` of `key`, and the same `same`, a key or label.

    Raises ConfigError, naming them, if rows have no control.
    """
    controls = {row[same]: row for row in rows if row[key] == usual}
    alone = [row["runs"][0].name for row in rows if row[same] not in controls]
    require(not alone, f"{', '.join(alone)}: no run with {key}={usual} to compare with. Run it too, or leave these out")
    return lambda row: None if row[key] == usual else controls[row[same]]
