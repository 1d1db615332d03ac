"""Figures of one number per run: a dot with its 95 % interval over seeds for each setting, every seed beside it.

Learning curves are in figures.py. Intervals are Student's t (stats.interval); a single seed has a dot and no interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from qerl_bench.errors import require
from qerl_bench.results.load import Run
from qerl_bench.results.select import Row
from qerl_bench.results.stats import Mean, interval
from qerl_bench.results.style import (
    FORMAT_COLOURS,
    colour,
    label_axes,
    legend_above,
    line_style,
    panels,
    paper_style,
)

Number = Callable[[Run], float]
CONTROLS = ("none", "exp", "format_error")  # noise that is compared with and without quantization
DETAILS = {"model.name": "{}", "quantizer.name": "{}", "optim.lr": "lr {:g}"}  # named in labels where they differ
# The one figure in which colour is not the format: its runs have the same.
SCHEDULES = {"none": "#7F7F7F", "exp": "#D55E00", "linear": "#56B4E9", "cosine": "#E69F00", "log": "#CC79A7"}


@dataclass(frozen=True)
class Column:
    """One panel: what it is called, and the number of a run that it shows; `share` is ticked in per cent."""

    label: str
    of: Number
    share: bool = False


def final(decoding: str) -> Number:
    """Held-out accuracy after training. The function raises BadInput for a run that was not evaluated then."""

    def of(run: Run) -> float:
        found = run.series("eval", f"eval/accuracy_{decoding}")
        found = found.loc[found.index > 0].dropna()
        require(not found.empty, f"{run.name} was not evaluated after training: run it with eval=task, or leave it out")
        return float(found.iloc[-1])

    return of


def dots(rows: Sequence[Row], columns: Sequence[Column]) -> Figure:
    """A line of dots per setting (see `select.arms`), named by its `label`, and a panel per column.

    Colour is the format, a filled dot has noise. Vertical lines mark the first row, which the others compare with.
    """
    labels = [row["label"] for row in rows]
    with paper_style():
        figure, axes = panels(1, len(columns), 0.7 + 0.13 * len(rows), sharey=True)
        for ax, column in zip(axes[0], columns, strict=True):
            for place, row in enumerate(rows):
                values = [column.of(run) for run in row["runs"]]
                _dot(ax, place, values, colour(row["quant.name"]), row["aqn.name"] != "none", row["label"])
                if place == 0:
                    mean = interval(values).mean
                    ax.axvline(mean, color="#BBBBBB", linewidth=0.6, zorder=0.5, label="_reference")
            _finish_rows(ax, column, labels)
        figure.suptitle(_note(rows, " (small ticks: seeds)"))
    return figure


def format_rows(rows: Sequence[Row], axis: str = "") -> list[Row]:
    """`rows` with labels, format by format, no noise first; `axis` is a config key that the labels leave out."""
    labelled = [row | {"label": _name(row, _telling(rows, axis))} for row in rows]
    return sorted(labelled, key=lambda row: (_place(row["quant.name"]), row["aqn.name"] != "none", row["label"]))


def control_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows that answer whether an effect is the noise's, labelled: BF16, NVFP4 and the controls."""
    labelled = [row | {"label": _control(row) + _details(row, _telling(rows))} for row in rows]
    kept = [row for row in labelled if row["aqn.name"] in CONTROLS and row["quant.name"] in ("bf16", "nvfp4")]
    return sorted(kept, key=lambda row: (_place(row["quant.name"]), row["aqn.name"] != "none", row["label"]))


def schedules(rows: Sequence[Row], columns: Sequence[Column]) -> Figure:
    """Sigma by step of each schedule, and a panel per column with a row for each; other kinds of noise are left out."""
    rows = [row for name in SCHEDULES for row in rows if row["aqn.name"] == name]
    with paper_style():
        figure, axes = panels(1, 1 + len(columns), 1.7)
        for place, row in enumerate(rows):
            sigma = row["runs"][0].series("train", "aqn/sigma")
            shade, name = SCHEDULES[row["aqn.name"]], row["aqn.name"]
            axes[0, 0].plot(sigma.index, sigma, drawstyle="steps-mid", color=shade, linewidth=1.2, label=name)
            for ax, column in zip(axes[0, 1:], columns, strict=True):
                _dot(ax, place, [column.of(run) for run in row["runs"]], shade, name != "none", name)
        label_axes(axes[0, 0], "aqn/sigma")
        for ax, column in zip(axes[0, 1:], columns, strict=True):
            _finish_rows(ax, column, [row["aqn.name"] for row in rows])
        for ax in axes[0, 2:]:
            ax.set_yticklabels([])
        figure.suptitle(_note(rows, " (small ticks: seeds)"))
    return figure


def against(rows: Sequence[Row], key: str, columns: Sequence[Column], label: str) -> Figure:
    """Each column against the numeric config key `key`, on a logarithmic axis.

    There is a line for each format and noise that has several values. Raises BadInput if two settings of one line have
    the same value.
    """
    lines: dict[str, list[Row]] = {}
    labelled = format_rows(rows, axis=key)
    for row in sorted(labelled, key=lambda row: row[key]):
        lines.setdefault(row["label"], []).append(row)
    names = dict.fromkeys(row["label"] for row in labelled)
    lines = {name: lines[name] for name in names if len(lines[name]) > 1}
    values = sorted({row[key] for line in lines.values() for row in line})
    with paper_style():
        figure, axes = panels(1, len(columns), 1.9)
        for ax, column in zip(axes[0], columns, strict=True):
            for side, (name, line) in enumerate(lines.items()):
                found = [row[key] for row in line]
                require(len(set(found)) == len(found), f"several settings of {name} have one value of {key}: {found}")
                apart = 1 + 0.08 * (side - (len(lines) - 1) / 2)  # side by side, so that no interval hides another
                means = [interval([column.of(run) for run in row["runs"]]) for row in line]
                ax.errorbar(
                    [value * apart for value in found], [mean.mean for mean in means],
                    yerr=[_half(mean) for mean in means], fmt="o", elinewidth=1, linewidth=1, label=name,
                    color=colour(line[0]["quant.name"]), linestyle=line_style(line[0]["aqn.name"]),
                )  # fmt: skip
            ax.set_xscale("log")
            ax.set_xticks(values, [_tick(value) for value in values], fontsize=6)
            ax.xaxis.set_minor_locator(NullLocator())
            ax.set_xlabel(label)
            ax.set_ylabel(column.label)
            if column.share:
                ax.yaxis.set_major_formatter(FuncFormatter(_percent))
        legend_above(figure, axes[0], [_note(rows)])
    return figure


def _tick(value: float) -> str:
    """32 as it is, 0.002 as 2e-3: rates stand close to each other on their axis."""
    return f"{value:g}" if value >= 0.01 else np.format_float_scientific(value, trim="-", exp_digits=1)


def _dot(ax: Axes, place: int, values: list[float], shade: str, filled: bool, label: str) -> None:
    ax.plot(values, [place + 0.25] * len(values), "|", color=shade, alpha=0.5, markersize=3, label="_seeds")
    mean = interval(values)
    ax.errorbar(
        mean.mean, place, xerr=_half(mean), fmt="o", color=shade, markerfacecolor=shade if filled else "white",
        elinewidth=1, label=f"_{label}",
    )  # fmt: skip


def _half(mean: Mean) -> float:
    """Half of an interval; nothing where there is none."""
    return 0.0 if math.isnan(mean.half) else mean.half


def _finish_rows(ax: Axes, column: Column, rows: Sequence[str]) -> None:
    ax.set_xlabel(column.label)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=3))
    if column.share:
        ax.xaxis.set_major_formatter(FuncFormatter(_percent))
    ax.set_yticks(range(len(rows)), rows)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)


def _place(quant: str) -> int:
    """Where a format stands among others: known ones first."""
    return [*FORMAT_COLOURS, quant].index(quant)


def _name(row: Row, telling: Sequence[str]) -> str:
    noise = "no noise" if row["aqn.name"] == "none" else f"AQN {row['aqn.name']}"
    return f"{row['quant.name'].upper()}, {noise}{_details(row, telling)}"


def _telling(rows: Sequence[Row], axis: str = "") -> list[str]:
    """Of DETAILS but `axis` those in which `rows` differ; 16-bit weights have no quantizer to differ in."""
    quantized = [row for row in rows if row["quant.name"] != "bf16"]
    found = {key: {row["runs"][0].option(key) for row in rows} for key in DETAILS}
    found["quantizer.name"] = {row["runs"][0].option("quantizer.name") for row in quantized}
    return [key for key, values in found.items() if len(values) > 1 and key != axis]


def _details(row: Row, telling: Sequence[str]) -> str:
    run = row["runs"][0]
    shown = [key for key in telling if not (key == "quantizer.name" and row["quant.name"] == "bf16")]
    return "".join(f", {DETAILS[key].format(run.option(key))}" for key in shown)


def _control(row: Row) -> str:
    parts = [row["quant.name"].upper()]
    if row["aqn.name"] == "exp":
        parts.append(f"AQN from {row['aqn.sigma_start']:g}")
    if row["aqn.name"] == "format_error":
        parts.append("format_error" + ("_fixed" if row["inject.cadence"] == "run" else ""))
    if row["rollout.temperature"] != 1:
        parts.append(f"temperature {row['rollout.temperature']:g}")
    if row["optim.entropy_coef"] > 0:
        parts.append(f"entropy bonus {row['optim.entropy_coef']:g}")
    return ", ".join(parts)


def _note(rows: Sequence[Row], marks: str = "") -> str:
    seeds = len(rows[0]["runs"])
    return f"mean and 95% interval of {seeds} seeds{marks}" if seeds > 1 else "a single seed"


def _percent(share: float, _: object) -> str:
    return f"{round(100 * share, 6):g}%"
