"""The page of a study's probes, in Markdown: accuracy and entropy of formats, noise, copies without rounding error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from matplotlib.figure import Figure

from qerl_core.statistics import Estimate
from qerl_studies.figures.probe import ProbePanel, Shown, in_panels
from qerl_studies.probes.numbers import PARTS
from qerl_studies.probes.over_units import (
    Number,
    Record,
    by_scale,
    detailed,
    distances,
    dose,
    entropy_at,
    entropy_of_part,
    formats_of,
    groups,
    log_over,
    mean_accuracy,
    mean_of,
    measured_in,
    minus,
    pass_k,
    right_at,
    share_at,
    without_error,
)
from qerl_studies.tables.markdown import markdown_table

NOTE = (
    "Accuracies are per cent, their differences points, entropy and KL nats a token. Differences and ratios are to the "
    "first format of the same unit. Brackets are 95 % intervals: Student's t over units, or over questions where there "
    "is one unit. Temperatures below 1 have top-p 0.95."
)


def markdown(probes: Sequence[Record]) -> str | None:
    """The page; None without a probe that has details."""
    known = detailed(probes)
    if not known:
        return None
    parts = ["# Probes", NOTE]
    for name, units in groups(known).items():
        parts += [f"## {name or 'All units'} ({len(units)})", accuracies(units), passes(units)]
        parts += [entropies(units), by_part(units)]
        if all(one["curve"] for it in units for one in it["formats"].values()):
            parts += [noise(units)]
        if any(one.get("doses") for one in units):
            parts += [matched(units)]
    if scaled := extrapolations(known):
        parts += ["## Without the rounding error of the file", scaled]
    return "\n\n".join(parts) + "\n"


def accuracies(units: Sequence[Record]) -> str:
    heads = ["quant", "units", "temperature", "right", "difference", "lenient", "difference", "answer found", "cut off"]
    heads += ["tokens"]
    lines, first = [], formats_of(units)[0]
    for quant in formats_of(units):
        having = measured_in(quant, units)
        for at in having[0]["formats"][quant]["temperatures"]:
            found, finished, tokens = (
                mean_of(units, quant, share_at(at, key)).value for key in ("found", "finished", "tokens")
            )
            cells = [quant, str(len(having)), at]
            for column in ("correct", "lenient"):
                gap = mean_of(units, quant, minus(first, right_at(at, column)))
                cells += [
                    points(mean_accuracy(units, quant, at, column), 1),
                    points(gap, 1, signed=True) if quant != first else "",
                ]
            lines.append([*cells, f"{found:.0%}", f"{1 - finished:.1%}", f"{tokens:.0f}"])
    return markdown_table(heads, lines)


def passes(units: Sequence[Record]) -> str:
    """pass@k at temperature 1, for k in powers of two."""
    samples = units[0]["formats"][formats_of(units)[0]]["temperatures"]["1"]["samples"]
    ks = [2**power for power in range(samples.bit_length())]
    lines = [[quant, *(points(mean_of(units, quant, pass_k("1", k)), 1) for k in ks)] for quant in formats_of(units)]
    return markdown_table(["quant", *(f"pass@{k}" for k in ks)], lines)


def entropies(units: Sequence[Record]) -> str:
    """Entropy by temperature as a ratio to the first format, KL, and what each format is worth as a draft."""
    temperatures = [*units[0]["formats"][formats_of(units)[0]]["temperatures"]]
    heads = ["quant", *(f"entropy at {at}" for at in temperatures), *distances(units)]
    first, *others = formats_of(units)
    levels = [f"{mean_of(units, first, entropy_at(at)).value:.4f}" for at in temperatures]
    lines = [[first, *levels, *_distances(units, first)]]
    lines += [
        [
            quant,
            *(times(mean_of(units, quant, log_over(first, entropy_at(at)))) for at in temperatures),
            *_distances(units, quant),
        ]
        for quant in others
    ]
    return markdown_table(heads, lines)


def by_part(units: Sequence[Record]) -> str:
    """Entropy by tenth of the completion at temperature 1: of the first format, then ratios to it."""
    first, *others = formats_of(units)
    lines = [[first, *(f"{mean_of(units, first, entropy_of_part(part)).value:.4f}" for part in range(PARTS))]]
    lines += [
        [quant, *(times(mean_of(units, quant, log_over(first, entropy_of_part(part)))) for part in range(PARTS))]
        for quant in others
    ]
    return markdown_table(["quant", *(f"tenth {part + 1}" for part in range(PARTS))], lines)


def noise(units: Sequence[Record]) -> str:
    """What noise does in each format, next to the same format without."""
    lines = [
        [
            quant,
            f"{one['sigma']:g}",
            times(mean_of(units, quant, dose(at, "entropy"))),
            bracketed(mean_of(units, quant, dose(at, "kl")), "{:.4f}"),
            points(mean_of(units, quant, dose(at, "accuracy")), 1, signed=True),
        ]
        for quant in formats_of(units)
        for at, one in enumerate(measured_in(quant, units)[0]["formats"][quant]["curve"])
        if at
    ]
    return markdown_table(["quant", "sigma", "entropy ratio", "KL", "right, difference"], lines)


def matched(units: Sequence[Record]) -> str:
    """The noise that was found for each arm and unit, with its rise and KL on other prompts and draws."""
    lines = []
    for one in units:
        for arm, found in one.get("doses", {}).items():
            cells = ["none found", "-", "-"]
            if found["sigma"] is not None:
                cells = [f"{found['sigma']:.3g}", f"x{1 + found['rise']:.3f}", f"{found['kl']:.4f}"]
            lines.append([" ".join(one["unit"]), arm, *cells])
    return markdown_table(["unit", "arm", "sigma", "entropy ratio", "KL"], lines)


def extrapolations(probes: Sequence[Record]) -> str | None:
    """Entropy and accuracy of the first format and what others change, by size of dither, and where they point.

    None with one size.
    """
    scaled = by_scale(probes)
    if not scaled:
        return None
    units = [one for copies in scaled.values() for one in copies.values()]
    first, *others = formats_of(units)
    temperatures = [*units[0]["formats"][first]["temperatures"]]
    entropy, signed = entropy_at("1"), partial(points, digits=1, signed=True)
    rows: list[tuple[str, str, Number, Callable[[Estimate], str]]] = []
    rows += [(first, "entropy at 1", entropy, partial(bracketed, form="{:.3f}"))]
    rows += [(first, f"right at {at}", right_at(at), partial(points, digits=1)) for at in temperatures]
    for quant in others:
        rows += [(quant, "entropy ratio at 1", log_over(first, entropy), times)]
        rows += [(quant, f"right at {at}", minus(first, right_at(at)), signed) for at in temperatures]
    lines: list[list[str]] = []
    names: list[str] = []
    for quant, name, number, told in rows:
        by_size = [mean_of([*copies.values()], quant, number) for copies in scaled.values()]
        found = without_error(scaled, quant, number)
        names = [*found]
        lines.append([quant, name, *map(told, [*by_size, *found.values()])])
    copies = len(next(iter(scaled.values())))
    note = f"{copies} copies in {len(scaled)} sizes of dither; the last columns are extrapolated to -1, copy by copy."
    heads = ["quant", "number", *(f"{scale:g} cells" for scale in scaled), *names]
    return f"{note}\n\n{markdown_table(heads, lines)}"


def figures(probes: Sequence[Record]) -> dict[str, Callable[[], Figure]]:
    """What draws the figures of the page, by name: one for each group of several units, or one over sizes of dither.

    None without a second format.
    """
    known = detailed(probes)
    drawings: dict[str, Callable[[], Figure]] = {}
    scaled = by_scale(known)
    for number, units in enumerate(() if scaled else groups(known).values()):
        first, *others = formats_of(units)
        if others and len(units) > 1:
            fewer = [
                f"{quant} of {len(measured_in(quant, units))}"
                for quant in others
                if len(measured_in(quant, units)) < len(units)
            ]
            note = f"To {first} of the same unit, and noise to the same format without: means of {len(units)} units"
            note += f" ({', '.join(fewer)})." if fewer else "."
            drawings[f"probes{number or ''}"] = partial(_of_formats, units, others, note)
    if scaled:
        copies = len(next(iter(scaled.values())))
        note = f"Means of {copies} copies. Right: each copy extrapolated to a file without rounding error."
        drawings["probes_dither"] = lambda: in_panels(dither_panels(scaled), note)
    return drawings


def _of_formats(units: Sequence[Record], others: Sequence[str], note: str) -> Figure:
    return in_panels(format_panels(units, others), note)


def format_panels(units: Sequence[Record], others: Sequence[str]) -> list[ProbePanel]:
    first = formats_of(units)[0]
    temperatures = [*units[0]["formats"][first]["temperatures"]]
    right = {
        quant: [as_points(mean_of(units, quant, minus(first, right_at(at)))) for at in temperatures] for quant in others
    }
    parts = {
        quant: [as_per_cent(mean_of(units, quant, log_over(first, entropy_of_part(part)))) for part in range(PARTS)]
        for quant in others
    }
    tenths = [str(part + 1) for part in range(PARTS)]
    panels = [
        ProbePanel(title="right answers", axis="temperature", at=temperatures, lines=right, label="difference, points"),
        ProbePanel(
            title="entropy at temperature 1", axis="tenth of the completion", at=tenths, lines=parts,
            label="difference, %",
        ),
    ]  # fmt: skip
    curve = units[0]["formats"][first]["curve"]
    if curve and all(one["curve"] for it in units for one in it["formats"].values()):
        sizes = range(1, len(curve))
        rises = {
            quant: [as_per_cent(mean_of(units, quant, dose(at, "entropy"))) for at in sizes]
            for quant in formats_of(units)
        }
        falls = {
            quant: [as_points(mean_of(units, quant, dose(at, "accuracy"))) for at in sizes]
            for quant in formats_of(units)
        }
        sigmas = [f"{curve[at]['sigma']:g}" for at in sizes]
        panels += [
            ProbePanel(title="entropy with noise", axis="sigma", at=sigmas, lines=rises, label="change, %"),
            ProbePanel(title="right answers with noise", axis="sigma", at=sigmas, lines=falls, label="change, points"),
        ]
    return panels


def dither_panels(sizes: Mapping[float, Mapping[str, Record]]) -> list[ProbePanel]:
    """Entropy and accuracy at temperature 1 by size of dither, with both extrapolations at the left."""
    first, *others = formats_of([one for copies in sizes.values() for one in copies.values()])
    panels = []
    for title, label, number, shown in (
        ("entropy", "difference, %", log_over(first, entropy_at("1")), as_per_cent),
        ("right answers", "difference, points", minus(first, right_at("1")), as_points),
    ):
        lines = {}
        for quant in others:
            means = [mean_of([*copies.values()], quant, number) for copies in sizes.values()]
            ends = without_error(sizes, quant, number)
            lines[quant] = [shown(one) for one in (*means, *ends.values())]
        at = [*(f"{size:g}" for size in sizes), *ends]
        panels.append(
            ProbePanel(
                title=f"{title} at temperature 1", axis="dither, cell variances", at=at, lines=lines, label=label,
                apart=len(ends),
            )
        )  # fmt: skip
    return panels


def as_points(estimate: Estimate) -> Shown:
    return 100 * estimate.value, 100 * estimate.low, 100 * estimate.high


def as_per_cent(estimate: Estimate) -> Shown:
    """What the logarithm of a ratio says in per cent of a change."""
    low, high = (100 * math.expm1(end) for end in (estimate.low, estimate.high))
    return 100 * math.expm1(estimate.value), low, high


def times(estimate: Estimate) -> str:
    """A ratio from its logarithm."""
    return _or_dash(estimate, lambda value: f"x{math.exp(value):.3f}", lambda end: f"{math.exp(end):.3f}")


def points(estimate: Estimate, digits: int, signed: bool = False) -> str:
    sign = "+" if signed else ""
    return _or_dash(estimate, lambda value: f"{100 * value:{sign}.{digits}f}")


def bracketed(estimate: Estimate, form: str) -> str:
    return _or_dash(estimate, form.format)


def _or_dash(estimate: Estimate, *show: Callable[[float], str]) -> str:
    """A dash for what was not measured."""
    return "-" if math.isnan(estimate.value) else estimate.text(*show)


def _distances(units: Sequence[Record], quant: str) -> list[str]:
    return [bracketed(mean_of(units, quant, number), "{:.4f}") for number in distances(units).values()]
