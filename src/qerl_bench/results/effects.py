"""Figures of one number per run: a dot with its 95 % interval over seeds for each setting, every seed beside it.

Learning curves are in figures.py. Intervals are Student's t (stats.interval); a single seed has a dot and no interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from qerl_bench.errors import require
from qerl_bench.results.load import Run
from qerl_bench.results.stats import interval
from qerl_bench.results.style import FORMAT_COLOURS, colour, legend_above, line_style, panels, paper_style

Number = Callable[[Run], float]


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
        found = found[found.index > 0].dropna()
        require(not found.empty, f"{run.name} was not evaluated after training: run it with eval=task, or leave it out")
        return float(found.iloc[-1])

    return of


def dots(table: pd.DataFrame, rows: Sequence[str], columns: Sequence[Column], note: str = "") -> Figure:
    """A row per setting of `table` (see `select.arms`), named by `rows` from top to bottom, and a panel per column.

    Colour is the format, a filled dot has noise. Vertical lines mark the first row, which the others compare with.
    """
    with paper_style():
        figure, axes = panels(1, len(columns), 0.35 + 0.17 * len(rows), sharey=True)
        for ax, column in zip(axes[0], columns, strict=True):
            for place, (_, row) in enumerate(table.iterrows()):
                values = [column.of(run) for run in row["runs"]]
                shade = colour(row["quant.name"])
                ax.plot(values, [place + 0.22] * len(values), "|", color=shade, alpha=0.5, markersize=3, label="_seeds")
                noisy = row["aqn.name"] != "none"
                mean = interval(values)
                half = 0 if math.isnan(mean.half) else mean.half
                ax.errorbar(
                    mean.mean, place, xerr=half, fmt="o", color=shade, markerfacecolor=shade if noisy else "white",
                    elinewidth=1, label=f"_{rows[place]}",
                )  # fmt: skip
                if place == 0:
                    ax.axvline(mean.mean, color="#BBBBBB", linewidth=0.6, zorder=0.5, label="_reference")
            ax.set_xlabel(column.label)
            ax.xaxis.set_major_locator(MaxNLocator(nbins=3))
            if column.share:
                ax.xaxis.set_major_formatter(FuncFormatter(_percent))
            ax.set_yticks(range(len(rows)), rows)
            ax.tick_params(axis="y", length=0)
            ax.grid(axis="y", visible=False)
        axes[0, 0].set_ylim(len(rows) - 0.4, -0.6)
        figure.suptitle(", ".join(filter(None, [_note(table), note])))
    return figure


def against(table: pd.DataFrame, key: str, columns: Sequence[Column], label: str) -> Figure:
    """Each column against the numeric config key `key`, on a logarithmic axis: a line per format and noise.

    Raises BadInput if two settings of one line have the same value.
    """
    with paper_style():
        figure, axes = panels(1, len(columns), 1.9)
        lines = table.groupby(["quant.name", "aqn.name"], sort=False)
        known = [*FORMAT_COLOURS]
        order = sorted(lines, key=lambda item: (known.index(item[0][0]) if item[0][0] in known else 9, item[0]))
        for ax, column in zip(axes[0], columns, strict=True):
            for side, ((quant, aqn), rows) in enumerate(order):
                rows = rows.sort_values(key)
                require(rows[key].is_unique, f"several settings of quant={quant} aqn={aqn} have one value of {key}")
                apart = 1 + 0.05 * (side - (len(order) - 1) / 2)  # side by side, so that no interval hides another
                means = [interval([column.of(run) for run in runs]) for runs in rows["runs"]]
                name = f"{quant.upper()}, {'no noise' if aqn == 'none' else f'AQN {aqn}'}"
                ax.errorbar(
                    rows[key].astype(float) * apart, [mean.mean for mean in means],
                    yerr=[0 if math.isnan(mean.half) else mean.half for mean in means], fmt="o", elinewidth=1,
                    color=colour(quant), linestyle=line_style(aqn), linewidth=1, label=name,
                )  # fmt: skip
            values = sorted(set(table[key]))
            ax.set_xscale("log")
            ax.set_xticks(values, [f"{value:g}" for value in values])
            ax.xaxis.set_minor_locator(NullLocator())
            ax.set_xlabel(label)
            ax.set_ylabel(column.label)
            if column.share:
                ax.yaxis.set_major_formatter(FuncFormatter(_percent))
        legend_above(figure, axes[0], [_note(table)])
    return figure


def _note(table: pd.DataFrame) -> str:
    seeds = len(table["runs"].iloc[0])
    return f"mean and 95% interval of {seeds} seeds" if seeds > 1 else "a single seed"


def _percent(share: float, _: object) -> str:
    return f"{round(100 * share, 6):g}%"
