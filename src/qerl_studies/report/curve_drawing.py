"""Arms by step as SVG, which a page shows without a script: means over units, and bands of their 95 % intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from qerl_core.statistics import Estimate
from qerl_studies.figures.headline import Headline, by_step
from qerl_studies.runs.load import Run

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 230, 56, 12, 8, 36  # of a drawing, in its own units
FEW = 4  # points that are marked
BANDED = 3  # units of a band: those of two are 13 standard errors wide
Curve = Sequence[tuple[float, Estimate]]


@dataclass(frozen=True)
class DrawnArm:
    """An arm, its color, and by which filters it stays."""

    name: str
    runs: Sequence[Run]
    shade: str
    axes: Mapping[str, str]


@dataclass(frozen=True)
class Frame:
    """Numbers to places: steps from 0 to `last`, values from `low` to `high`; what lies beyond is drawn at the edge."""

    low: float
    high: float
    last: float

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.last

    def y(self, value: float) -> float:
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    def points(self, pairs: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in pairs)


def draw(arms: Sequence[DrawnArm], headline: Headline) -> Markup | None:
    """The arms that have the metric; None if none has."""
    curves = [(arm, found) for arm in arms if (found := by_step(arm.runs, headline))]
    if not curves:
        return None
    frame = _frame([found for _, found in curves], share="%" in headline.form)
    label = f"{headline.title} by step: {', '.join(arm.name for arm, _ in curves)}"
    head = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(WIDTH, HEIGHT, label)
    drawn = [_axes(frame, headline.form), *(_arm(frame, *curve, headline.form) for curve in curves)]
    return head + Markup("").join(drawn) + Markup("</svg>")


def _frame(curves: Sequence[Curve], share: bool) -> Frame:
    points = [one for curve in curves for _, one in curve]
    ends = [one.value for one in points] + [end for one in points if one.n >= BANDED for end in (one.low, one.high)]
    low, high = (bound(end for end in ends if math.isfinite(end)) for bound in (min, max))
    room = 0.05 * (high - low) or 0.5 * abs(high) or 0.5
    low, high = (low - room if low < 0 else max(low - room, 0.0)), high + room
    last = max(step for curve in curves for step, _ in curve)
    return Frame(low, min(high, 1.0) if share and low < 1 else high, last or 1)


def _axes(frame: Frame, form: str) -> Markup:
    line = Markup('<line class="axis" x1="{}" x2="{}" y1="{}" y2="{}"/>')
    text = Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>')
    left, right, bottom = LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [line.format(left, right, bottom, bottom), line.format(left, left, TOP, bottom)]
    for value in round_ticks(frame.low, frame.high):
        shown = f"{100 * value:.6g}%" if "%" in form else f"{value:.6g}"
        parts.append(text.format(left - 6, f"{frame.y(value) + 4:.1f}", "end", shown))
    for step in round_ticks(0, frame.last, integer=True):
        parts.append(text.format(f"{frame.x(step):.1f}", bottom + 16, "middle", f"{step:.0f}"))
    return Markup("").join([*parts, text.format((left + right) / 2, HEIGHT - 4, "middle", "step")])


def round_ticks(low: float, high: float, integer: bool = False) -> list[float]:
    """Up to six round numbers from `low` to `high`, of steps whole ones."""
    fewest = 1 if integer else 3
    found = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], integer=integer, min_n_ticks=fewest).tick_values(low, high)
    room = 1e-9 * (high - low)
    return [round(float(tick), 12) for tick in found if low - room <= tick <= high + room]


def _arm(frame: Frame, arm: DrawnArm, curve: Curve, form: str) -> Markup:
    ends = [f"{one.value:{form}} at step {step:g}" for step, one in (curve[0], curve[-1])]
    parts = [Markup("<title>{}</title>").format(f"{arm.name}: {', '.join(ends)}")]
    band = [(step, one) for step, one in curve if one.n >= BANDED and math.isfinite(one.half_width)]
    if len(band) > 1:
        around = [(step, one.high) for step, one in band] + [(step, one.low) for step, one in reversed(band)]
        around_text = frame.points(around)
        parts.append(Markup('<polygon points="{}" fill="{}" opacity="0.15"/>').format(around_text, arm.shade))
    points = frame.points((step, one.value) for step, one in curve)
    line = Markup('<polyline points="{}" fill="none" stroke="{}" stroke-width="2"/>')
    parts.append(line.format(points, arm.shade))
    if len(curve) <= FEW:
        mark = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="3" fill="{}"/>')
        parts += [mark.format(frame.x(step), frame.y(one.value), arm.shade) for step, one in curve]
    return Markup('<g data-axes="{}">{}</g>').format(json.dumps(arm.axes), Markup("").join(parts))
