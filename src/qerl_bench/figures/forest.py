"""Forest plots: effects with their intervals, the margin as a band, what the paper reports as hollow marks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from textwrap import fill

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qerl_bench.claims.estimate import Effect, Setting
from qerl_bench.claims.judge import Judgement, Result
from qerl_bench.figures.style import FULL_WIDTH, SMALL, caption, panels, paper_style

REACH = 5.0  # margins; marks beyond stand at the edge as arrows
BAND, ZERO, BLACK, ROBUST, PAPER = "#E4E4E4", "#777777", "#000000", "#0072B2", "#D55E00"
VERDICTS = {"supported": "#00694d", "reversed": "#a34700", "negligible": "#0b5394"}
OPEN = "#666666"
LABEL = 46  # characters of a label in one line
ROW = 0.19  # inches


def all_claims(judgements: Sequence[Judgement], scope: str) -> Figure:
    """Every primary contrast on one axis, in margins of its own claim: to the right is what the paper claims.

    Small dots are single bases, or nothing where there is one; hollow diamonds are the paper's numbers; an arrow marks
    what lies beyond the axis.
    """
    lines = list(_lines(judgements))
    with paper_style():
        figure, axes = panels(1, 1, 0.7 + ROW * len(lines), width=FULL_WIDTH)
        ax = axes[0, 0]
        _ground(ax, 1.0)
        for y, (_, judgement, result, first) in enumerate(lines):
            claim = judgement.claim
            scaled = _scaled((-1 if claim.expected == "less" else 1) / claim.margin)
            effect = result.primary.effect if result.primary else None
            if effect:
                _mark(ax, y, effect, scaled, OPEN if result.status else BLACK, "D", REACH)
            for number in claim.paper_effects if first else ():
                _point(ax, y, scaled(number), "D", PAPER, REACH, hollow=True)
            if word := judgement.verdict if first else result.status or "":
                shade = VERDICTS.get(word.split(" ")[0], OPEN)
                ax.text(REACH * 1.06, y, word, color=shade, va="center", fontsize=SMALL)
        _rows(ax, [label for label, *_ in lines])
        ax.set_xlim(-REACH, REACH)
        ax.set_xlabel("effect in margins, to the right as claimed")
        ax.set_title(scope, loc="left")
        caption(figure, *_explained(judgements))
    return figure


def one_claim(judgement: Judgement) -> Figure:
    """The primary setting of each contrast large and black, checks of robustness and published arms small and blue."""
    claim = judgement.claim
    rows = [
        (result, setting, setting is result.primary)
        for result in judgement.results
        for setting in sorted(result.settings, key=lambda one: one is not result.primary)
        if setting.effect
    ]
    show: Callable[[float], float] = claim.measure.shown
    effects = [setting.effect for _, setting, primary in rows if primary and setting.effect]
    widest = max([claim.margin, *(max(abs(e.whole.low), abs(e.whole.high)) for e in effects if e.whole.n > 1)])
    reach = 2.5 * abs(show(widest))
    with paper_style():
        labels = [fill(_label(result, setting, primary), LABEL) for result, setting, primary in rows]
        figure, axes = panels(1, 1, 0.75 + ROW * sum(label.count("\n") + 1 for label in labels), width=FULL_WIDTH)
        ax = axes[0, 0]
        _ground(ax, abs(show(claim.margin)))
        for y, (_, setting, primary) in enumerate(rows):
            assert setting.effect is not None
            _mark(ax, y, setting.effect, show, BLACK if primary else ROBUST, "D" if primary else "o", reach)
        for number in claim.paper_effects:
            _point(ax, 0, show(number), "D", PAPER, reach, hollow=True)
        _rows(ax, labels)
        ax.set_xlim(-reach, reach)
        unit = "difference in %" if claim.measure.ratio else f"difference in {claim.measure.unit}"
        ax.set_xlabel(f"{unit} (band: margin; hollow: paper; arrows: beyond)")
    return figure


def svg(figure: Figure) -> str:
    """The figure as SVG text, the same on any day."""
    buffer = BytesIO()
    with paper_style(), matplotlib.rc_context({"svg.hashsalt": "claims"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue().decode()


def _lines(judgements: Sequence[Judgement]) -> Iterator[tuple[str, Judgement, Result, bool]]:
    """Label, claim and contrast of each row; whether it is the first of its claim."""
    for number, judgement in enumerate(judgements, start=1):
        for result in judgement.voting:
            first = result is judgement.voting[0]
            contrast = result.contrast.label if len(judgement.voting) > 1 else ""
            head = f"{number}. {judgement.claim.title}" if first else ""
            yield ": ".join(filter(None, (head, contrast))), judgement, result, first


def _explained(judgements: Sequence[Judgement]) -> Iterator[str]:
    effects = [r.primary.effect for j in judgements for r in j.voting if r.primary and r.primary.effect]
    origins = " or ".join(sorted({f"{effect.whole.n} {effect.unit}s" for effect in effects}))
    if effects:
        yield f"Diamonds: primary contrasts, with 95% intervals (Student's t over {origins}), grey where not testable."
    yield "One margin: 2% of entropy, 0.02 of reward, 1 point of accuracy, 5% of a time or memory."
    yield "Grey band: less than that. Hollow diamonds: the paper. Arrows: beyond the axis."
    if any(effect.bases for effect in effects):
        yield "Dots: single base models."
    elif effects:
        yield "All from one base model, for which alone the intervals speak."


def _label(result: Result, setting: Setting, primary: bool) -> str:
    published = ", as published" if result.contrast.confounded else ""
    return f"{result.contrast.label}{published}" + (": primary" if primary else f": {setting.label}")


def _scaled(factor: float) -> Callable[[float], float]:
    return lambda value: value * factor


def _ground(ax: Axes, margin: float) -> None:
    ax.axvspan(-margin, margin, color=BAND, linewidth=0, zorder=0)
    ax.axvline(0, color=ZERO, linewidth=0.7, zorder=1)


def _mark(
    ax: Axes, y: float, effect: Effect, show: Callable[[float], float], shade: str, kind: str, reach: float
) -> None:
    whole = effect.whole
    if whole.n > 1:
        ends = sorted((show(whole.low), show(whole.high)))
        ax.plot([max(ends[0], -reach), min(ends[1], reach)], [y, y], color=shade, linewidth=1.4 if kind == "D" else 0.9)
        for end in ends:
            if abs(end) > reach:
                _point(ax, y, end, kind, shade, reach, hollow=False)
    for mean in effect.bases.by_base if effect.bases else ():
        ax.plot(max(-reach, min(reach, show(mean.mean))), y + 0.28, "o", color=shade, alpha=0.45, markersize=2)
    _point(ax, y, show(whole.mean), kind, shade, reach, hollow=whole.n == 1)


def _point(ax: Axes, y: float, x: float, kind: str, shade: str, reach: float, hollow: bool) -> None:
    """A mark at x, or an arrow at the edge that x lies beyond."""
    marker = kind if abs(x) <= reach else (">" if x > 0 else "<")
    face = "none" if hollow else shade
    place = max(-reach, min(reach, x))
    ax.plot(place, y, marker, color=shade, markerfacecolor=face, markersize=4.5, clip_on=False, zorder=3)


def _rows(ax: Axes, labels: Sequence[str]) -> None:
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(False, axis="y")
