"""The pages of part 1 of the fair test, from what was packed.

    python studies/fair-2026/calibration.py

For each size in calibration/data: probes.md, as `qerl-bench gates` writes it, and quantizers.svg. Of all sizes
words.md, which says what calibration/protocol.md asks, in its words. Left out: the figure that `gates` draws, which
gives two of seven formats one color.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qerl_core.exits import guarded
from qerl_core.process.arguments import KeyValueParser
from qerl_core.rundir.durable import write_atomically
from qerl_core.statistics import CONFIDENCE, Estimate, holm, mean_ci, t_quantile
from qerl_studies.design.sessions import read_probes
from qerl_studies.figures.style import FULL_WIDTH, GRAY, color, panels, paper_style, save
from qerl_studies.probes.over_units import Record, entropy_at, kl, log_over, mean_of, right_at
from qerl_studies.report.probe_page import bracketed, markdown, points, times
from qerl_studies.tables.markdown import markdown_table

HERE = Path(__file__).resolve().parent / "calibration"
SIZES = {"05b": "0.5B", "15b": "1.5B"}  # folders of data
NEAREST = "nvfp4"
QUANTIZERS = ("mse", "four-six", "gptq", "awq", "gptq-text", "awq-text")
TESTED = QUANTIZERS[:4]
LESS_FIRST = ("mse", "four-six", "awq-text", "awq", "gptq-text", "gptq")  # what asks for less before what asks for more
TEMPERATURES = ("0", "0.6")
COPIES = 12
LEVEL, MARGIN, EQUAL = 0.05, 0.01, 0.005
NAMES = {
    NEAREST: "nearest",
    "nvfp4+mse": "mse",
    "nvfp4+four-six": "four-six",
    "nvfp4+gptq": "GPTQ, task's text",
    "nvfp4+awq": "AWQ, task's text",
    "nvfp4+gptq-text": "GPTQ, other text",
    "nvfp4+awq-text": "AWQ, other text",
}
HEIGHTS = (0, 1, 2, 3.4, 4.4, 5.8, 6.8)  # of the rows of the figure: no text, the task's, another


def main(arguments: list[str] | None = None) -> None:
    KeyValueParser(__doc__).parse_args(arguments)
    looked = {folder: read_probes(HERE / "data" / folder) for folder in SIZES if (HERE / "data" / folder).is_dir()}
    for name, page in pages_of(looked).items():
        (HERE / "results" / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(HERE / "results" / name, page)
        print(HERE / "results" / name)
    for folder, probes in looked.items():
        save(quantizers_figure(probes), HERE / "results" / folder / "quantizers")


def pages_of(looked: Mapping[str, Sequence[Record]]) -> dict[str, str]:
    """The pages of the sizes that have data, by the names of their files."""
    pages = {f"{folder}/probes.md": markdown(probes) or "" for folder, probes in looked.items()}
    return pages | {"words.md": words_page({SIZES[folder]: probes for folder, probes in looked.items()})}


@dataclass(frozen=True)
class Contrast:
    """A quantizer minus nearest, right answers at temperature 0.6; `p` is after Holm."""

    found: Estimate
    p: float
    word: str


def contrasts(probes: Sequence[Record]) -> dict[str, Contrast]:
    """The four that the protocol tests."""
    found = {name: minus(probes, quant_of(name), NEAREST, "0.6") for name in TESTED}
    adjusted = holm([one.p_outside(0.0) for one in found.values()]).tolist()
    return {name: Contrast(one, p, word_of(one, p)) for (name, one), p in zip(found.items(), adjusted, strict=True)}


def word_of(found: Estimate, p: float) -> str:
    """The protocol's word. At fewer copies than planned it is *not decided*."""
    if found.n < COPIES:
        return "not decided"
    if p < LEVEL:
        return "higher" if found.value > 0 else "lower"
    within = found.low >= -MARGIN and found.high <= MARGIN
    return "no difference beyond the margin" if within else "not decided"


def quant_of(name: str) -> str:
    return f"{NEAREST}+{name}"


def right(probes: Sequence[Record], quant: str, temperature: str) -> np.ndarray:
    """Shares of right answers, by the last number: (copies,)."""
    return np.array([right_at(temperature, "lenient")(one, quant).mean() for one in probes])


def minus(probes: Sequence[Record], quant: str, other: str, temperature: str) -> Estimate:
    return mean_ci(right(probes, quant, temperature) - right(probes, other, temperature))


def damage(probes: Sequence[Record], quant: str, temperature: str) -> Estimate:
    return minus(probes, quant, "bf16", temperature)


def share_taken(probes: Sequence[Record], quant: str, temperature: str) -> tuple[float, float, float]:
    """The part of nearest's damage that `quant` takes away, and its interval.

    A ratio of two means over the same copies. Fieller's interval: all ratios r for which the mean of `gained - r x
    lost` is not told from 0 by a t test over copies. NaN where these are no interval, since the damage is not told
    from 0.
    """
    nearest = right(probes, NEAREST, temperature)
    gained, lost = right(probes, quant, temperature) - nearest, right(probes, "bf16", temperature) - nearest
    squared = t_quantile((1 + CONFIDENCE) / 2, len(lost) - 1) ** 2
    (of_gained, of_both), (_, of_lost) = squared * np.cov(gained, lost) / len(lost)
    top, bottom = gained.mean(), lost.mean()
    square, half, constant = bottom**2 - of_lost, top * bottom - of_both, top**2 - of_gained
    if square <= 0:
        return top / bottom, math.nan, math.nan
    width = math.sqrt(half**2 - square * constant)
    return top / bottom, (half - width) / square, (half + width) / square


def measured(probes: Sequence[Record]) -> list[str]:
    """The formats but BF16 that every copy has."""
    return [quant for quant in NAMES if all(quant in one["formats"] for one in probes)]


def lacking(probes: Sequence[Record]) -> str:
    """The formats that are not read, since some copy lacks them, with how many have them; empty if there is none."""
    counts = {quant: sum(quant in one["formats"] for one in probes) for quant in NAMES}
    return ", ".join(f"{NAMES[quant]} ({n} of {len(probes)} copies)" for quant, n in counts.items() if n < len(probes))


def mean_damage(sizes: Mapping[str, Sequence[Record]], name: str) -> float:
    """Over sizes and both temperatures, in points: below 0 where answers are lost. NaN if a size lacks it."""
    if not all(quant_of(name) in measured(probes) for probes in sizes.values()):
        return math.nan
    each = [damage(probes, quant_of(name), at).value for probes in sizes.values() for at in TEMPERATURES]
    return 100 * float(np.mean(each))


def better_quantizer(sizes: Mapping[str, Sequence[Record]]) -> str:
    """What the protocol's rule takes of these sizes, of the quantizers that both have."""
    means = {name: mean_damage(sizes, name) for name in QUANTIZERS}
    return next(name for name in LESS_FIRST if means[name] >= np.nanmax([*means.values()]) - 100 * EQUAL)


def needed(sizes: Mapping[str, Sequence[Record]], name: str) -> dict[str, float]:
    """The mean damage, in points, that `name` must be above to be taken, in each size that lacks it."""
    chosen, ahead = better_quantizer(sizes), 100 * EQUAL
    if LESS_FIRST.index(name) < LESS_FIRST.index(chosen):
        ahead = -ahead  # it is taken even if it is a little worse
    least = len(sizes) * (mean_damage(sizes, chosen) + ahead)
    known = {size: probes for size, probes in sizes.items() if quant_of(name) in measured(probes)}
    return {
        size: least - sum(mean_damage({other: sizes[other]}, name) for other in known)
        for size in sizes
        if size not in known and len(known) == len(sizes) - 1
    }


# --- words.md --------------------------------------------------------------------------------------------------------


def words_page(sizes: Mapping[str, Sequence[Record]]) -> str:
    parts = [
        "# What calibration is worth: the protocol's words",
        "Right answers are those whose last number is right, per cent; differences are points. Brackets are 95 % "
        "intervals: Student's t over copies, or Fieller's for a share.",
    ]
    for size, probes in sizes.items():
        parts += [f"## {size}, {len(probes)} copies", *words_of(probes)]
    return "\n\n".join([*parts, "## Over both sizes", *over_sizes(sizes)]) + "\n"


def words_of(probes: Sequence[Record]) -> list[str]:
    """What one size says."""
    tested = [
        [
            f"{name} - nearest",
            points(one.found, 2, signed=True),
            f"{one.found.p_outside(0.0):.4f}",
            f"{one.p:.4f}",
            f"**{one.word}**",
        ]
        for name, one in contrasts(probes).items()
    ]
    shown = [
        [
            NAMES[quant],
            *(points(damage(probes, quant, at), 2, signed=True) for at in TEMPERATURES),
            times(mean_of(probes, quant, log_over("bf16", entropy_at("1")))),
            *(bracketed(mean_of(probes, quant, kl(way)), "{:.4f}") for way in ("of_reference", "own")),
        ]
        for quant in measured(probes)
    ]
    shares = [
        [NAMES[quant], *(per_cent(share_taken(probes, quant, at)) for at in TEMPERATURES)]
        for quant in measured(probes)[1:]
    ]
    texts = [
        [name, *(points(minus(probes, quant_of(name), quant_of(f"{name}-text"), at), 2, True) for at in TEMPERATURES)]
        for name in ("gptq", "awq")
        if quant_of(f"{name}-text") in measured(probes)
    ]
    levels = ", ".join(f"{100 * right(probes, 'bf16', at).mean():.2f} at {at}" for at in TEMPERATURES)
    at = [f"temperature {at}" for at in TEMPERATURES]
    return [
        "### The four contrasts: right answers at temperature 0.6",
        markdown_table(["contrast", "difference", "p", "p (Holm)", "word"], tested),
        "### Each quantizer beside BF16, without words",
        f"BF16 is right in {levels}.",
        markdown_table(
            [
                "quantizer",
                *(f"damage at {at}" for at in TEMPERATURES),
                "entropy at 1",
                "KL, answers of BF16",
                "KL, own answers",
            ],
            shown,
        ),
        "### The part of nearest's damage that each takes away, without words",
        markdown_table(["quantizer", *at], shares),
        *(["### The task's text minus the other text, without words"] if texts else []),
        *([markdown_table(["quantizer", *at], texts)] if texts else []),
        *([f"Not read, since copies lack it: {lacking(probes)}."] if lacking(probes) else []),
    ]


def per_cent(share: tuple[float, float, float]) -> str:
    value, low, high = (f"{100 * one:.0f}" for one in share)
    return f"{value} %" if math.isnan(share[1]) else f"{value} % [{low}, {high}]"


def over_sizes(sizes: Mapping[str, Sequence[Record]]) -> list[str]:
    """What the protocol's page may say, and the rule for what follows: of sizes that have run whole."""
    sizes = {size: probes for size, probes in sizes.items() if len(probes) >= COPIES}
    missing = " and ".join(size for size in SIZES.values() if size not in sizes)
    if not sizes:
        return [f"Open until the {missing} have run whole."]
    means = {name: mean_damage(sizes, name) for name in QUANTIZERS}
    chosen = better_quantizer(sizes)
    heads = ["quantizer", "mean damage at 0 and 0.6"]
    known = sorted((name for name in QUANTIZERS if not math.isnan(means[name])), key=lambda name: -means[name])
    rows = {name: [name, f"{means[name]:+.2f}"] for name in known}
    bounds = [
        f"`{name}` was not read in the {size}: to be taken it needs a mean damage there above {above:+.2f} (BF16: 0)."
        for name in QUANTIZERS
        if name not in rows
        for size, above in needed(sizes, name).items()
    ]
    rule = f"The rule takes `{chosen}`."
    if missing:
        rule = (
            f"**Open until the {missing} has run whole**: the rule takes the mean of both sizes. "
            f"Of the {', '.join(sizes)} alone it would take `{chosen}`."
        )
    if missing and chosen == LESS_FIRST[-1]:
        heads.append(f"{chosen} is not taken if in the {missing} this has less damage, by")
        for name in rows:
            lead = means[chosen] - means[name]  # and that of the mean of both must be within half a point
            rows[name].append("" if name == chosen else f"{lead - 200 * EQUAL:.2f}")
    table = markdown_table(heads, rows.values())
    return [stand_in(sizes, missing), "### The better quantizer", rule, table, *bounds]


def stand_in(sizes: Mapping[str, Sequence[Record]], missing: str) -> str:
    """Which of the protocol's sentences about nearest rounding can be said."""
    best = {
        size: max(share_taken(probes, quant_of(name), "0.6")[0] for name in TESTED) for size, probes in sizes.items()
    }
    higher = any(one.word == "higher" for probes in sizes.values() for one in contrasts(probes).values())
    enough = all(share >= 0.5 for share in best.values())
    told = "; ".join(f"{size} {100 * share:.0f} %" for size, share in best.items())
    unfair, fair = ("was no fair stand-in for the paper's NVFP4", "was a fair stand-in before training")
    return "\n".join(
        [
            f"The best of the four takes away this part of nearest's damage at 0.6: {told}.",
            "",
            f"- *Nearest rounding {unfair}*: {'no' if not enough else 'open' if missing else 'yes'}.",
            f"- *Nearest rounding {fair}*: {'no, one is higher' if higher else 'open' if missing else 'yes'}.",
            *([f"\nThe {missing} has not run whole."] if missing else []),
        ]
    )


# --- figure ----------------------------------------------------------------------------------------------------------


def quantizers_figure(probes: Sequence[Record]) -> Figure:
    """Damage, entropy and KL of each quantizer, beside BF16 on the same copies."""
    with paper_style():
        figure, ((lost, rise, far),) = panels(1, 3, height=2.6, width=FULL_WIDTH, sharey=True)
        shown = {quant: y for quant, y in zip(NAMES, HEIGHTS, strict=True) if quant in measured(probes)}
        for quant, y in shown.items():
            for at, marker, filled, aside in zip(TEMPERATURES, "so", (False, True), (-0.17, 0.17), strict=True):
                found = damage(probes, quant, at)
                interval(lost, 100 * np.array([found.value, found.low, found.high]), y + aside, marker, filled)
            ratio, distance = (
                mean_of(probes, quant, log_over("bf16", entropy_at("1"))),
                mean_of(probes, quant, kl("of_reference")),
            )
            interval(rise, 100 * np.expm1([ratio.value, ratio.low, ratio.high]), y, "o", True)
            interval(far, 1000 * np.array([distance.value, distance.low, distance.high]), y, "o", True)
        lost.set_yticks([*shown.values()], [NAMES[quant] for quant in shown])
        lost.set_ylim(max(shown.values()) + 0.6, -0.6)
        lost.set_xlabel("right answers minus BF16, points")
        rise.set_xlabel("entropy at 1, % above BF16")
        far.set_xlabel("KL from BF16, 0.001 nats a token")
        for axes in (lost, rise, far):
            axes.axvline(0, color=GRAY, linewidth=0.8)
            axes.grid(axis="x")
            axes.grid(visible=False, axis="y")
        marks = [
            Line2D(
                [],
                [],
                color=color(NEAREST),
                marker=marker,
                linestyle="",
                markerfacecolor=fill,
                markersize=4,
                label=label,
            )
            for marker, fill, label in (("s", "white", "greedy"), ("o", color(NEAREST), "temperature 0.6"))
        ]
        figure.legend(handles=marks, loc="outside upper left", ncols=2)
        return figure


def interval(axes: Any, shown: Any, y: float, marker: str, filled: bool) -> None:
    """A number and its interval, `shown` (3,)."""
    value, low, high = shown
    axes.errorbar(
        value, y, xerr=[[value - low], [high - value]], color=color(NEAREST), marker=marker, markersize=4,
        markerfacecolor=color(NEAREST) if filled else "white", linewidth=1,
    )  # fmt: skip


if __name__ == "__main__":
    guarded(main)
