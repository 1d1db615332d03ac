"""All verdicts of claims.json in one picture: a row for each, released models above, bases made here below."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qerl_studies.effects.state import State
from qerl_studies.figures.forest import REACH, ROW, SHADES
from qerl_studies.figures.style import BAND, FULL_WIDTH, GRAY, caption, panels, paper_style, small

KINDS = {True: "released models", False: "bases made here"}


def all_verdicts(content: Mapping[str, Any]) -> Figure:
    """Effects in margins of their claim, as claimed to the right; `content` is that of claims.json."""
    groups = {
        title: list(_lines(one for one in content["verdicts"] if content["studies"][one["study"]]["released"] is kind))
        for kind, title in KINDS.items()
    }
    heights = [max(2, len(lines)) for lines in groups.values()]
    with paper_style():
        height = 1.5 + ROW * sum(heights)
        figure, axes = panels(2, 1, height, width=FULL_WIDTH, sharex=True, height_ratios=heights)
        for ax, (title, lines) in zip(axes[:, 0], groups.items(), strict=True):
            _panel(ax, title, lines)
        axes[-1, 0].set_xlabel("effect in margins, to the right as claimed")
        caption(
            figure,
            "Diamonds: effects with 95% intervals, over bases where a study has several, and of answers for other "
            "questions too, except in studies with contrasts of their own; arrows: beyond the axis.",
            "Grey band: less than one margin. Each study is judged by itself.",
            _together([one["correlation"] for one in content["verdicts"] if one["correlation"] is not None]),
        )
    return figure


def _together(correlations: Sequence[float]) -> str:
    if not correlations:
        return ""
    return f"Arms correlate {min(correlations):+.2f} to {max(correlations):+.2f}."


def _lines(records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """The rows of a panel: the name of each study, and below it its records with the claim, once, and the contrast."""
    for name, of_study in groupby(records, key=itemgetter("study")):
        yield name, None
        for title, of_claim in groupby(of_study, key=itemgetter("claim")):
            first, *more = of_claim
            yield f"{title}: {first['contrast']}" if more else title, first
            yield from ((one["contrast"], one) for one in more)


def _panel(ax: Axes, title: str, lines: Sequence[tuple[str, Mapping[str, Any] | None]]) -> None:
    ax.axvspan(-1, 1, color=BAND, linewidth=0, zorder=0)
    ax.axvline(0, color=GRAY, linewidth=0.7)
    for y, (_, one) in enumerate(lines):
        if one is not None:
            _mark(ax, y, one)
    if not lines:
        ax.text(0, 0.5, "none yet", color=GRAY, ha="center", va="center", fontsize=small())
    ax.set_yticks(range(len(lines)), [label for label, _ in lines], fontsize=small())
    for text, (_, one) in zip(ax.get_yticklabels(), lines, strict=True):
        text.set_fontweight("bold" if one is None else "normal")
    ax.set(xlim=(-REACH, REACH), ylim=(max(2, len(lines)) - 0.4, -0.6))
    ax.tick_params(axis="y", length=0)
    ax.grid(False, axis="y")
    ax.set_title(title, loc="left")


def _mark(ax: Axes, y: float, record: Mapping[str, Any]) -> None:
    shade = SHADES[State(**record["state"]).kind]
    value = in_margins(record, record["effect"])
    if record["low"] is not None:
        ends = [_inside(in_margins(record, record[end])) for end in ("low", "high")]
        ax.plot(ends, [y, y], color=shade, linewidth=1.2)
    marker = "D" if abs(value) <= REACH else ">" if value > 0 else "<"
    ax.plot(_inside(value), y, marker, color=shade, markersize=3.5, clip_on=False, zorder=3)
    ax.text(REACH * 1.06, y, record["verdict"], color=shade, va="center", fontsize=small())


def in_margins(record: Mapping[str, Any], value: float) -> float:
    """A number of a record in margins of its claim; above zero as claimed."""
    sign = -1 if record["expected"] == "less" else 1
    ratio = record["unit"] == "ratio"
    return sign * (math.log(value) / math.log(record["margin"]) if ratio else value / record["margin"])


def _inside(value: float) -> float:
    return max(-REACH, min(REACH, value))
