"""Specification curves: the effect behind each verdict under other choices of answers, start and pooling."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qerl_studies.claims.specification import Specification
from qerl_studies.figures.effects import label_rows
from qerl_studies.figures.forest import BAND, ROW
from qerl_studies.figures.style import FULL_WIDTH, caption, margin_band, panels, paper_style, small

COLUMNS = 3
WIDE = 29  # letters of a line of a title
FURTHER = 6.0  # times the least reach of a row of panels, beyond which a panel has a scale of its own
SHADES = {"sampled": "#000000", "greedy": "#0072B2", "reward": "#000000"}


def specification_table(specifications: Sequence[Specification]) -> pd.DataFrame:
    """A row for each specification; effects in the unit of figures."""
    rows = []
    for one in specifications:
        effects = dict(zip(("effect", "low", "high"), one.measure.ends_on_axis(one.estimate), strict=True))
        shared = {"claim": one.claim, "contrast": one.contrast, "specification": one.label}
        rows.append(shared | {"decides": one.decides, "units": one.estimate.n} | effects | {"unit": one.measure.unit})
    return pd.DataFrame(rows)


def specification_curve(specifications: Sequence[Specification]) -> Figure:
    """A panel for each contrast, a row for each specification, with 95 % intervals; the margin is a band.

    Claims about one effect, or about its opposite, share a panel. Panels side by side share a scale, but for one whose
    effects reach much further.
    """
    kinds = [
        [one for one in specifications if one.measure.unit == unit]
        for unit in dict.fromkeys(one.measure.unit for one in specifications)
    ]
    blocks = [block for kind in kinds for block in _blocks(kind)]
    titles = [0.14 * max(len(panel.title) for panel in block) for block in blocks]
    heights = [0.4 + title + ROW * len(_labels(block)) for block, title in zip(blocks, titles, strict=True)]
    columns = max(map(len, blocks))
    with paper_style():
        figure, axes = panels(len(blocks), columns, sum(heights), FULL_WIDTH, height_ratios=heights)
        for row, block in zip(axes, blocks, strict=True):
            most = FURTHER * min(panel.reach for panel in block)
            near = [panel for panel in block if panel.reach <= most]
            for place, ax in enumerate(row):
                if place < len(block):
                    panel = block[place]
                    _draw(ax, panel, _labels(block), near if panel in near else [panel], named=place == 0)
                else:
                    ax.set_visible(False)
        caption(
            figure,
            "Bars: 95% intervals (Student's t over bases; with other questions, over both). Black: sampled, or reward; "
            "blue: greedy.",
            "Diamonds: what the verdict, in bold, is about.",
            "Hollow: pooled over this study and all others of the task in which no gate of the claim failed.",
            "Gain, above its start: over what the same arm had before training, which 4 bits lower.",
            "Numbers: of bases. Grey band: the margin. Scales differ where effects do by a lot.",
        )
    return figure


@dataclass
class Panel:
    """What is drawn of one contrast, and the claims about it, each with 1, or -1 if it is about the opposite effect."""

    specifications: list[Specification]
    claims: list[tuple[Specification, int]]

    @property
    def title(self) -> list[tuple[str, str]]:
        """Lines, each with its weight."""
        lines = []
        for one, sign in self.claims:
            turned = "" if sign > 0 else " (effects turned round)"
            lines += [(line, "normal") for line in textwrap.wrap(f"{one.claim}: {one.contrast}{turned}", WIDE)]
            lines += [(line, "bold") for line in textwrap.wrap(one.verdict, WIDE)]
        return lines

    @property
    def ends(self) -> list[float]:
        """Effects, ends of intervals and margin, as drawn."""
        first = self.specifications[0].measure
        ends = [end for one in self.specifications for end in first.ends_on_axis(one.estimate)]
        return [end for end in (*ends, *first.band) if not math.isnan(end)]

    @property
    def reach(self) -> float:
        return max(map(abs, self.ends))


def _blocks(kind: Sequence[Specification]) -> list[list[Panel]]:
    """Rows of panels."""
    shown: list[Panel] = []
    for claim, contrast in dict.fromkeys((one.claim, one.contrast) for one in kind):
        found = [one for one in kind if (one.claim, one.contrast) == (claim, contrast)]
        same = ((panel, sign) for panel in shown for sign in (1, -1) if _repeats(found, panel.specifications, sign))
        panel, sign = next(same, (None, 1))
        if panel:
            panel.claims.append((found[0], sign))
        else:
            shown.append(Panel(found, [(found[0], 1)]))
    return [shown[start : start + COLUMNS] for start in range(0, len(shown), COLUMNS)]


def _repeats(some: Sequence[Specification], others: Sequence[Specification], sign: int) -> bool:
    """Whether both have the same rows, with one effect in each, or with opposite ones."""
    return len(some) == len(others) and all(
        one.label == other.label and one.decides == other.decides and one.repeats(other, sign)
        for one, other in zip(some, others, strict=True)
    )


def _labels(block: Sequence[Panel]) -> list[str]:
    """The specifications of a row of panels, of this study first, then pooled."""
    fullest_first = sorted(block, key=lambda panel: -len(panel.specifications))
    ordered = sorted((one for panel in fullest_first for one in panel.specifications), key=lambda one: one.pooled)
    return [*dict.fromkeys(one.label for one in ordered)]


def _draw(ax: Axes, panel: Panel, labels: Sequence[str], scaled: Sequence[Panel], named: bool) -> None:
    """`scaled`: the panels that have its scale."""
    first = panel.specifications[0].measure
    margin_band(ax, *first.band, "x", BAND)
    for variant in panel.specifications:
        y, shade = labels.index(variant.label), SHADES[variant.way.split(",")[0]]
        value, low, high = first.ends_on_axis(variant.estimate)
        if not math.isnan(variant.estimate.stderr):
            ax.plot([low, high], [y, y], color=shade, linewidth=1.1)
        ax.plot(
            value, y, "D" if variant.decides else "o", color=shade, markersize=4.5,
            markerfacecolor="white" if variant.pooled else shade,
        )  # fmt: skip
        ax.text(1.02, y, str(variant.estimate.n), transform=ax.get_yaxis_transform(), va="center", fontsize=small())
    label_rows(ax, labels if named else [""] * len(labels))
    ends = [end for one in scaled for end in one.ends]
    beside = 0.05 * (max(ends) - min(ends))
    ax.set_xlim(min(ends) - beside, max(ends) + beside)
    for place, (line, weight) in enumerate(reversed(panel.title)):
        ax.annotate(
            line, (0, 1), (0, 3 + 1.2 * small() * place), xycoords="axes fraction", textcoords="offset points",
            fontsize=small(), fontweight=weight, annotation_clip=False,
        )  # fmt: skip
    ax.set_xlabel(f"difference, {first.unit}")
