"""Figures of one number per run: what an arm is above its control, in pairs, with the margin of the claim as a band.

Learning curves are in curves.py; what is paired with what, and how sure that is, in paired.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from qerl_bench.errors import require
from qerl_bench.results.load import Run
from qerl_bench.results.naming import details, format_rows, sigma_of, telling
from qerl_bench.results.paired import Column, by_unit, collapsed, effect, interval_note, level, over_bases, repeated
from qerl_bench.results.select import Row
from qerl_bench.results.stats import Mean
from qerl_bench.results.style import (
    BAND,
    FULL_WIDTH,
    GREY,
    OTHER_COLOURS,
    SMALL,
    caption,
    colour,
    label_axes,
    label_ends,
    panels,
    paper_style,
    percent,
    place,
)

CONTROLS = ("none", "exp", "format_error")  # noise that is compared with and without quantization
SCHEDULES = ("none", "linear", "cosine", "log")  # each is compared with exp
NOTHING = "nothing added"
BANDS = "Grey band: the margin, within which a difference would not matter."
CROSS = "×: a run that collapsed, by ten points of accuracy or more from its own best."


@dataclass(frozen=True)
class Line:
    """One arm in a figure of differences; without a `control` it is a heading, or the control itself."""

    label: str
    runs: Sequence[Run] = ()
    control: Sequence[Run] = ()
    shade: str = GREY
    filled: bool = True


def line(row: Row, label: str, control: Row | None, shade: str = "") -> Line:
    """The line of a setting (see `select.arms`): its format's colour, filled with noise."""
    own = shade or colour(row["quant.name"])
    return Line(label, row["runs"], control["runs"] if control else (), own, row["aqn.name"] != "none")


# --- rows ------------------------------------------------------------------------------------------------------------


def effect_rows(lines: Sequence[Line], columns: Sequence[Column], *notes: str) -> Figure:
    """A row per line and a panel per column: the paired difference to its control, and its own level as a number."""
    lines = _filled(lines)
    with paper_style():
        figure, axes = panels(1, len(columns), 0.55 + 0.17 * len(lines), FULL_WIDTH, sharey=True)
        _draw_rows(axes[0], lines, columns)
        caption(figure, *notes, *_marks(lines, columns))
    return figure


def _draw_rows(axes: Sequence[Axes], lines: Sequence[Line], columns: Sequence[Column]) -> None:
    for ax, column in zip(axes, columns, strict=True):
        ax.axvspan(column.shown(-column.margin), column.shown(column.margin), color=BAND, linewidth=0, zorder=0)
        ax.axvline(0, color=GREY, linewidth=0.7, zorder=1, label="_control")
        for height, one in enumerate(lines):
            if one.control:
                _draw_effect(ax, height, one, column, along="x")
            if one.runs:
                ax.annotate(
                    level(one.runs, column), (1, height), (3, 0), xycoords=("axes fraction", "data"),
                    textcoords="offset points", va="center", fontsize=SMALL, color="#555555",
                )  # fmt: skip
        ax.set_title(column.label)
        ax.set_xlabel("difference, %" if column.ratio else f"difference{f', {column.unit}' if column.unit else ''}")
        ax.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
        ax.set_yticks(range(len(lines)), [one.label for one in lines])
        ax.set_ylim(len(lines) - 0.4, -0.6)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="y", visible=False)
    for tick, one in zip(axes[0].get_yticklabels(), lines, strict=True):
        tick.set_color(one.shade if one.runs else "black")
        tick.set_fontweight("normal" if one.runs else "bold")


def _draw_effect(ax: Axes, position: float, one: Line, column: Column, along: str) -> Mean:
    """A dot with its interval and the differences behind it, at `position` on the other axis; return what it shows."""
    mean, points = effect(one.runs, one.control, column)
    fallen = np.array([collapsed(run) for run in one.runs]) | np.array([collapsed(run) for run in one.control])
    crosses = fallen if len(points) == len(one.runs) else np.zeros(len(points), bool)
    middle, *ends = (column.shown(value) for value in (mean.mean, mean.low, mean.high))
    drawn = [column.shown(value) for value in points]
    for marker, chosen in ((".", ~crosses), ("x", crosses)):
        values = [value for value, there in zip(drawn, chosen, strict=True) if there]
        at = [position] * len(values)
        ax.plot(
            *((values, at) if along == "x" else (at, values)), marker, color=one.shade, alpha=0.45, markersize=3,
            markeredgewidth=0.7, label="_units", zorder=2,
        )  # fmt: skip
    reach = [[0.0], [0.0]] if len(points) == 1 else [[middle - ends[0]], [ends[1] - middle]]
    ax.errorbar(
        *((middle, position) if along == "x" else (position, middle)), fmt="o", color=one.shade, elinewidth=1.1,
        markerfacecolor=one.shade if one.filled else "white", label=f"_{one.label}", zorder=3, capsize=0, markersize=4.5,
        **{"xerr" if along == "x" else "yerr": reach},
    )  # fmt: skip
    return mean


def _filled(lines: Sequence[Line]) -> list[Line]:
    """`lines`, all of them filled unless some have noise and some have none."""
    mixed = len({one.filled for one in lines if one.control}) > 1
    return [replace(one, filled=one.filled or not mixed) for one in lines]


def _marks(lines: Sequence[Line], columns: Sequence[Column]) -> list[str]:
    """The sentences that say what is drawn, for a caption."""
    runs = [run for one in lines for run in one.runs]
    noisy = {one.filled for one in lines if one.control}
    marks = "Filled: with noise, hollow: without." if len(noisy) == 2 else ""
    fallen = CROSS if any(map(collapsed, runs)) else ""
    return [interval_note(lines[-1].runs), "Numbers: each arm's own mean.", marks, _margins(columns), fallen]


def _margins(columns: Sequence[Column]) -> str:
    said = [
        f"{column.label} ±{column.shown(column.margin):.3g}{'%' if column.ratio else f' {column.unit}'.rstrip()}"
        for column in columns
        if column.margin
    ]
    return f"{BANDS[:-1]} ({', '.join(said)})." if said else ""


def level_rows(lines: Sequence[Line], columns: Sequence[Column], *notes: str) -> Figure:
    """A row per line and a panel per column, from 0: each arm's own level and, below it, its ratio to its control."""
    lines = _filled(lines)
    with paper_style():
        figure, axes = panels(1, len(columns), 0.5 + 0.36 * len(lines), FULL_WIDTH, sharey=True)
        for ax, column in zip(axes[0], columns, strict=True):
            for height, one in enumerate(lines):
                values = [column.of(run) for run in one.runs]
                ax.plot(values, [height] * len(values), ".", color=one.shade, alpha=0.45, markersize=3, label="_units")
                shown = one.shade if one.filled else "white"
                mean = float(np.mean(values))
                ax.plot(mean, height, "o", color=one.shade, markerfacecolor=shown, label=f"_{one.label}", markersize=4.5)
                text = column.level.format(mean)
                if one.control:
                    found = effect(one.runs, one.control, column)[0]
                    ratio, low, high = (f"{np.exp(value):.2f}" for value in (found.mean, found.low, found.high))
                    text += f", ×{ratio}" + (f" [{low}, {high}]" if found.n > 1 and not found.identical else "")
                ax.annotate(
                    text, (0, height), (2, -8), xycoords=("axes fraction", "data"), textcoords="offset points",
                    va="center", fontsize=SMALL, color="#555555",
                )  # fmt: skip
            ax.set_xlim(left=0)
            ax.margins(x=0.08)
            ax.set_xlabel(column.label)
            ax.xaxis.set_major_locator(MaxNLocator(nbins=4))
            ax.set_yticks(range(len(lines)), [one.label for one in lines])
            ax.set_ylim(len(lines) - 0.3, -0.5)
            ax.tick_params(axis="y", length=0)
            ax.grid(axis="y", visible=False)
        for tick, one in zip(axes[0][0].get_yticklabels(), lines, strict=True):
            tick.set_color(one.shade)
        first = lines[0]
        runs = f"Points: {repeated(first.runs)}; small: each. " if len(first.runs) > 1 else "A single seed. "
        ratio = f"Numbers: mean and, for the others, ratio to {first.label} with its 95% interval (Student's t, in pairs)."
        marks = "Filled: with noise, hollow: without." if len({one.filled for one in lines}) == 2 else ""
        caption(figure, *notes, runs + ratio, marks)
    return figure


# --- which rows ------------------------------------------------------------------------------------------------------


def format_lines(rows: Sequence[Row]) -> list[Line]:
    """Each format minus BF16, without noise if any is, then noise minus none within each format."""
    ordered = format_rows(rows)
    alike = len({row["aqn.name"] for row in ordered}) == 1
    plain = [row for row in ordered if alike or row["aqn.name"] == "none"]
    lines = []
    if len(plain) > 1:
        lines = [Line(f"minus {plain[0]['label']}"), line(plain[0], f"{plain[0]['label']} (control)", None)]
        lines += [line(row, row["label"], plain[0]) for row in plain[1:]]
    noisy = [row for row in ordered if row not in plain]
    lines += [Line("noise minus none")] if noisy else []
    return lines + [line(row, row["label"], _same(row, plain)) for row in noisy]


def all_lines(rows: Sequence[Row]) -> list[Line]:
    """Every setting minus the first, BF16 without noise if that was run."""
    first, *others = format_rows(rows)
    mixed = len({row["aqn.name"] for row in rows}) > 1
    named = [(row, row["label"] + (f", AQN {row['aqn.name']}" if mixed and row["aqn.name"] != "none" else "")) for row in others]
    return [line(first, first["label"], None), *(line(row, label, first) for row, label in named)]


def control_lines(rows: Sequence[Row]) -> list[Line]:
    """What answers whether an effect is the noise's: BF16 with other sources of entropy, and NVFP4, minus plain BF16."""
    kept = [row for row in rows if row["aqn.name"] in CONTROLS and row["quant.name"] in ("bf16", "nvfp4")]
    keys = [key for key in telling(kept) if key != "rollout.temperature"]
    labelled = [row | {"label": _added(row) + details(row, keys)} for row in kept]
    ordered = sorted(labelled, key=lambda row: (place(row["quant.name"]), _added(row) != NOTHING, row["label"]))
    plain = [row for row in ordered if row["quant.name"] == "bf16" and _added(row) == NOTHING]
    require(
        len(plain) == 1,
        f"{len(plain)} of these settings are BF16 without noise, at temperature 1 and without entropy bonus; the others "
        "are compared with one such: add it with quant=bf16 aqn=none, or leave others out",
    )
    lines = []
    for quant in dict.fromkeys(row["quant.name"] for row in ordered):
        lines.append(Line(quant.upper()))
        of_format = [row for row in ordered if row["quant.name"] == quant]
        controls = [None if row is plain[0] else plain[0] for row in of_format]
        lines += [line(row, row["label"], control) for row, control in zip(of_format, controls, strict=True)]
    return lines


def _same(row: Row, among: Sequence[Row]) -> Row:
    """The one of `among` that is as `row` in format and label. Raises BadInput if there is none."""
    found = [other for other in among if (other["quant.name"], other["label"]) == (row["quant.name"], row["label"])]
    found = found or [other for other in among if other["quant.name"] == row["quant.name"]]
    require(bool(found), f"{row['runs'][0].name} has no control without noise: add it with aqn=none")
    return found[0]


def _added(row: Row) -> str:
    """What an arm has beside its weight format."""
    parts = []
    if row["aqn.name"] == "exp":
        parts.append(f"AQN from {row['aqn.sigma_start']:g}")
    if row["aqn.name"] == "format_error":
        how = "drawn once" if row["inject.cadence"] == "run" else "redrawn each step"
        parts.append(f"noise of NVFP4's size, {how}")
    if row["rollout.temperature"] != 1:
        parts.append(f"temperature {row['rollout.temperature']:g}")
    if row["optim.entropy_coef"] > 0:
        parts.append(f"entropy bonus {row['optim.entropy_coef']:g}")
    return ", ".join(parts) or NOTHING


# --- schedules, and numbers against an option ------------------------------------------------------------------------


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
        _draw_rows(others, lines, columns)
        for ax in others[1:]:
            ax.set_yticklabels([])
        kept = ", as it was put in with seed 0" if own["exp"]["runs"][0].series("train", "aqn/sigma").empty else ""
        caption(
            figure, f"Left: noise of each schedule{kept}. Right: each minus exp, on {rows[0]['quant.name'].upper()}.",
            *_marks(lines, columns),
        )  # fmt: skip
    return figure


def against(
    rows: Sequence[Row], key: str, columns: Sequence[Column], label: str, control: Callable[[Row], Row | None], minus: str
) -> Figure:
    """Levels of each format against the numeric config key `key`, on a logarithmic axis, and below them the differences.

    `control` gives the row that a row is compared with, None for a control itself; `minus` names it. Points of several
    formats at one value stand beside each other in the lower panels, and are not joined. Raises BadInput if a format
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
                means = [float(over_bases(by_unit(row["runs"], column.of)).to_numpy().mean()) for row in own]
                top.plot([row[key] for row in own], means, "o-", color=shade, linewidth=0.7, markersize=3, label=name)
                ends.append((means[-1], name, shade))
                for row in own:
                    other = control(row)
                    if other is not None:
                        there = [one["label"] for one in labelled if one[key] == row[key] and control(one) is not None]
                        aside = np.exp(step * (there.index(name) - (len(there) - 1) / 2))
                        one = line(row, name, other)
                        one = replace(one, filled=one.filled or not mixed)
                        _draw_effect(bottom, row[key] * aside, one, column, along="y")
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
        note = f"Top: means of {repeated(labelled[0]['runs'])}. Bottom: each {minus}; formats at one value stand side by side."
        caption(figure, note, interval_note(labelled[0]["runs"]), _margins(columns), *_marks(lines, columns)[-1:])
    return figure


def same_but(rows: Sequence[Row], key: str, usual: object, same: str) -> Callable[[Row], Row | None]:
    """For `against`: the control of a row is that with the value `usual` of `key`, and the same value of `same`.

    Raises BadInput, naming them, if rows have no control.
    """
    controls = {row[same]: row for row in rows if row[key] == usual}
    alone = [row["runs"][0].name for row in rows if row[same] not in controls]
    require(not alone, f"{', '.join(alone)}: no run with {key}={usual} to compare with. Run it too, or leave these out")
    return lambda row: None if row[key] == usual else controls[row[same]]
