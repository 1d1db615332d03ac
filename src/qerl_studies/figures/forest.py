"""Forest plots: effects with their intervals, the margin as a band, the paper's numbers as hollow marks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from io import BytesIO

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qerl_studies.claims.claim import ClaimResult, ContrastResult
from qerl_studies.effects.estimate import Effect
from qerl_studies.figures.compact import compact
from qerl_studies.figures.effects import label_rows
from qerl_studies.figures.paired import correlation_note
from qerl_studies.figures.style import FULL_WIDTH, caption, margin_band, panels, paper_style, small

REACH = 5.0  # margins; marks beyond are arrows at the edge
BAND, BLACK, PAPER = "#E4E4E4", "#000000", "#D55E00"
AS_CLAIMED, AGAINST, SMALL = "#00694d", "#a34700", "#0b5394"  # and without a claim: above zero, below it
OPEN = "#666666"
SHADES = {"supported": AS_CLAIMED, "opposite": AGAINST, "within": SMALL, "open": OPEN}  # by kind of state
ROW = 0.19  # inches


def all_claims(results: Sequence[ClaimResult], scope: str) -> Figure:
    """Every primary contrast on one axis, in margins of its claim; the direction that the paper claims is to the right.

    Small dots are single bases, if there are several; hollow diamonds are the paper's numbers; arrows point to marks
    beyond the axis. Claims without an effect to show are left out if others have one.
    """
    numbered = list(enumerate(results, start=1))
    shown = [(number, one) for number, one in numbered if _effects(one)] or numbered
    lines = list(_lines(shown))
    with paper_style():
        figure, axes = panels(1, 1, 0.7 + ROW * len(lines), width=FULL_WIDTH)
        ax = axes[0, 0]
        margin_band(ax, -1, 1, "x", BAND)
        for y, (_, claim_result, result, first) in enumerate(lines):
            claim = claim_result.claim
            margins = (-1 if claim.expected == "less" else 1) / claim.measure.margin
            effect = result.primary.effect if result.primary else None
            if effect:
                _mark(ax, y, effect, margins, OPEN if result.status else BLACK)
            for number in claim.reported_effects if first else ():
                _point(ax, y, number * margins, PAPER, hollow=True)
            if word := claim_result.verdict if first else result.status or "":
                shade = SHADES[claim_result.state.kind] if first else OPEN
                ax.text(REACH * 1.06, y, word, color=shade, va="center", fontsize=small())
        label_rows(ax, [label for label, *_ in lines])
        ax.set_xlim(-REACH, REACH)
        ax.set_xlabel("effect in margins, to the right as claimed")
        ax.set_title(scope, loc="left")
        left_out = ["Claims without an effect to show are left out."] if len(shown) < len(results) else []
        caption(figure, *_explained([one for _, one in shown]), *left_out)
    return figure


def svg(figure: Figure) -> str:
    """The figure as SVG text, the same on any day."""
    buffer = BytesIO()
    with paper_style(), matplotlib.rc_context({"svg.hashsalt": "claims"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return compact(buffer.getvalue().decode())


def _lines(numbered: Sequence[tuple[int, ClaimResult]]) -> Iterator[tuple[str, ClaimResult, ContrastResult, bool]]:
    """Label, claim and contrast of each row, and whether it is the first of its claim."""
    for number, claim_result in numbered:
        for result in claim_result.voting:
            first = result is claim_result.voting[0]
            contrast = result.contrast.label if len(claim_result.voting) > 1 else ""
            head = f"{number}. {claim_result.claim.title}" if first else ""
            yield ": ".join(filter(None, (head, contrast))), claim_result, result, first


def _effects(claim_result: ClaimResult) -> list[Effect]:
    return [one.primary.effect for one in claim_result.voting if one.primary and one.primary.effect]


def _explained(results: Sequence[ClaimResult]) -> Iterator[str]:
    effects = [effect for one in results for effect in _effects(one)]
    origins = " or ".join(sorted({f"{effect.whole.n} {effect.unit}s" for effect in effects}))
    drawn = "; questions of answers drawn" * any(effect.questions > 1 for effect in effects)
    if effects:
        intervals = f"95% intervals (Student's t over {origins}{drawn})"
        yield f"Diamonds: primary contrasts, with {intervals}, grey where not testable."
        yield correlation_note(effects)
    factors = {math.exp(one.claim.measure.margin) for one in results if "KL" in one.claim.measure.name}
    mismatch = f", a factor of {_either(factors)} of a KL" if factors else ""
    points = {1.0} | {m.margin * m.scale for m in (one.claim.measure for one in results) if m.unit == "points"}
    accuracy = f"{_either(points)} {'point' if len(points) == 1 else 'points'} of accuracy"
    yield f"One margin: 2% of entropy, 0.02 of reward, {accuracy}, 5% of a time or memory{mismatch}."
    paper = " Hollow diamonds: the paper." if any(one.claim.reported_effects for one in results) else ""
    alike = " Claims of no difference hold in it." if any(one.claim.expected == "same" for one in results) else ""
    yield f"Grey band: less than that.{alike}{paper} Arrows: beyond the axis."
    if any(effect.unit == "base" for effect in effects):
        yield "Dots: single base models on the axis."
    elif effects:
        yield "All from one base model, for which alone the intervals speak."


def _either(numbers: Collection[float]) -> str:
    return " or ".join(f"{number:g}" for number in sorted(numbers))


def _mark(ax: Axes, y: float, effect: Effect, margins: float, shade: str) -> None:
    """An effect, whose numbers are multiplied by `margins`."""
    whole = effect.whole
    if whole.n > 1:
        ends = sorted((whole.low * margins, whole.high * margins))
        ax.plot([max(ends[0], -REACH), min(ends[1], REACH)], [y, y], color=shade, linewidth=1.4)
        for end in ends:
            if abs(end) > REACH:
                _point(ax, y, end, shade, hollow=False)
    inside = [
        x for base in (effect.by_base if effect.unit == "base" else ()) if abs(x := base.value * margins) <= REACH
    ]
    ax.plot(inside, [y + 0.28] * len(inside), "o", color=shade, alpha=0.45, markersize=2)
    _point(ax, y, whole.value * margins, shade, hollow=whole.n == 1)


def _point(ax: Axes, y: float, x: float, shade: str, hollow: bool) -> None:
    """A mark at x, or an arrow at the edge if x is beyond it."""
    marker = "D" if abs(x) <= REACH else (">" if x > 0 else "<")
    face = "none" if hollow else shade
    inside = max(-REACH, min(REACH, x))
    ax.plot(inside, y, marker, color=shade, markerfacecolor=face, markersize=4.5, clip_on=False, zorder=3)
