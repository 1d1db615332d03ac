"""The pages of the first look, from what was packed.

    python studies/real-2026/first_look.py

For each folder of first-look/data: probes.md and its figures, as `qerl-bench gates` writes them; of all formats
answers.md, which asks what the first page could hide: few bad texts, answers that were cut off, the limit of tokens;
of many answers groups.md. And sizes.svg, all formats of both sizes, and axes.svg, those of the look at axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qerl_bench.conduct.archive import ANSWERS
from qerl_core.exits import guarded
from qerl_core.process.arguments import KeyValueParser
from qerl_core.rundir.durable import write_atomically
from qerl_core.statistics import Estimate, found_among, mean_ci
from qerl_studies.design.readings import mixed_group
from qerl_studies.design.sessions import read_probes
from qerl_studies.figures.style import FULL_WIDTH, color, panels, paper_style, save
from qerl_studies.probes.numbers import PARTS
from qerl_studies.probes.over_units import (
    Record,
    entropy_at,
    entropy_of_part,
    formats_of,
    kl,
    log_over,
    mean_of,
    measured_in,
    minus,
    right_at,
)
from qerl_studies.report.probe_page import bracketed, figures, markdown, points, times
from qerl_studies.tables.markdown import markdown_table

HERE = Path(__file__).resolve().parent / "first-look"
LIMITS = (512, 640, 768)  # tokens
SIZES = {"0.5B": "formats-05b", "1.5B": "formats-15b"}
DRAWN = (*SIZES.values(), "doses-05b")  # figures of the others show nothing beyond their tables
PASS_AT = (1, 8, 64)
GROUPS = (8, 16)  # completions
MARKERS = {"0": "s", "0.6": "o", "1": "^"}  # of temperatures
GARBLED = 1.0  # nats a token, in the mean of an answer


def main(arguments: list[str] | None = None) -> None:
    KeyValueParser(__doc__).parse_args(arguments)
    for folder in sorted((HERE / "data").iterdir()):
        out = HERE / "results" / folder.name
        out.mkdir(parents=True, exist_ok=True)
        for name, page in pages_of(folder).items():
            write_atomically(out / name, page)
        for name, draw in figures(read_probes(folder)).items() if folder.name in DRAWN else ():
            save(draw(), out / name)
        print(out)
    save(sizes({size: read_probes(HERE / "data" / folder) for size, folder in SIZES.items()}), HERE / "results/sizes")
    save(axes_figure(read_probes(HERE / "data" / "axes-15b")), HERE / "results/axes")


def pages_of(folder: Path) -> dict[str, str]:
    """The pages of what was packed into `folder`, by the names of their files."""
    probes = read_probes(folder)
    pages = {"probes.md": markdown(probes)}
    if folder.name.startswith("formats"):
        pages["answers.md"] = answers_page(pd.read_parquet(folder / ANSWERS), probes)
    if folder.name.startswith("many"):
        pages["groups.md"] = groups_page(probes)
    return {name: page for name, page in pages.items() if page}


def groups_page(probes: Sequence[Record]) -> str:
    """How often k answers have a right one, and how many groups have right and wrong ones, by copy."""
    heads = ["copy", "quant", *(f"pass@{k}" for k in PASS_AT), *(f"mixed groups of {size}" for size in GROUPS)]
    lines = []
    for one in probes:
        for quant, found in one["formats"].items():
            samples, right = found["samples"], found["correct"]
            passed = [fmean(found_among(k, samples, count) for count in right) for k in PASS_AT]
            mixed = [fmean(mixed_group(count, samples, size) for count in right) for size in GROUPS]
            lines.append([str(one["base"]), quant, *(f"{share:.1%}" for share in (*passed, *mixed))])
    return f"# Groups\n\n{markdown_table(heads, lines)}\n"


def sizes(looks: Mapping[str, Sequence[Record]]) -> Figure:
    """Entropy and right answers of each size, in each format that all of its copies have, relative to BF16."""
    with paper_style():
        figure, ((left, right),) = panels(1, 2, height=2.2, width=FULL_WIDTH)
        for row, probes in enumerate(looks.values()):
            others = [quant for quant in formats_of(probes)[1:] if len(measured_in(quant, probes)) == len(probes)]
            for place, quant in enumerate(others):
                y = row + (place - (len(others) - 1) / 2) / 3
                rise = mean_of(probes, quant, log_over("bf16", entropy_at("1")))
                horizontal(left, 100 * np.expm1([rise.value, rise.low, rise.high]), y, color(quant), "o")
                for nth, (temperature, marker) in enumerate(MARKERS.items()):
                    lost = mean_of(probes, quant, minus("bf16", right_at(temperature)))
                    at = y + (nth - 1) / 14
                    horizontal(right, 100 * np.array([lost.value, lost.low, lost.high]), at, color(quant), marker)
        left.set_xlabel("entropy at temperature 1, % above BF16")
        right.set_xlabel("right answers minus BF16, points")
        for axes in (left, right):
            axes.axvline(0, color="0.6", linewidth=0.8)
            axes.set_yticks(range(len(looks)), [*looks])
            axes.set_ylim(len(looks) - 0.5, -0.5)
        shown = {quant: "o" for probes in looks.values() for quant in formats_of(probes)[1:] if quant != "nf4"}
        left.legend(handles=[mark(quant.upper(), color(quant), shape) for quant, shape in shown.items()])
        right.legend(handles=[mark(f"temperature {name}", "0.3", shape) for name, shape in MARKERS.items()])
        return figure


def axes_figure(probes: Sequence[Record]) -> Figure:
    """KL, entropy and right answers at temperature 1 of each format beside BF16, in the order of the KL."""
    others = sorted(formats_of(probes)[1:], key=lambda quant: mean_of(probes, quant, kl("of_reference")).value)
    with paper_style():
        figure, (shown,) = panels(1, 3, height=2.8, width=FULL_WIDTH, sharey=True)
        for y, quant in enumerate(others):
            far, rise = (
                mean_of(probes, quant, kl("of_reference")),
                mean_of(probes, quant, log_over("bf16", entropy_at("1"))),
            )
            lost = mean_of(probes, quant, minus("bf16", right_at("1")))
            horizontal(shown[0], (far.value, far.low, far.high), y, "0.2", "o")
            horizontal(shown[1], 100 * np.expm1([rise.value, rise.low, rise.high]), y, "0.2", "o")
            horizontal(shown[2], 100 * np.array([lost.value, lost.low, lost.high]), y, "0.2", "o")
        shown[0].set_xscale("log")
        shown[0].set_yticks(range(len(others)), others)
        shown[0].set_xlabel("KL from BF16, nats a token")
        shown[1].set_xlabel("entropy, % above BF16")
        shown[2].set_xlabel("right answers minus BF16, points")
        for axes in shown[1:]:
            axes.axvline(0, color="0.6", linewidth=0.8)
        return figure


def horizontal(axes: Any, shown: Any, y: float, shade: str, marker: str) -> None:
    """A number and its interval, `shown` (3,)."""
    value, low, high = shown
    axes.errorbar(value, y, xerr=[[value - low], [high - value]], color=shade, marker=marker, markersize=3.5)


def mark(label: str, shade: str, marker: str) -> Line2D:
    return Line2D([], [], color=shade, marker=marker, linestyle="", label=label, markersize=3.5)


def answers_page(answers: Any, probes: Sequence[Record]) -> str:
    sampled = answers[answers["temperature"] == 1]
    each = sampled["entropy"] / sampled["tokens"]
    cuts = {
        "all answers": by_token(sampled),
        "right ones": by_token(sampled[sampled["correct"]]),
        "wrong ones": by_token(sampled[~sampled["correct"]]),
        "finished ones": by_token(sampled[sampled["finished"]]),
        f"of at most {GARBLED:g} nat a token": by_token(sampled[each <= GARBLED]),
        "median answer": by_answer(sampled),
    }
    temperatures = sorted(answers["temperature"].unique())
    parts = [
        "# Answers",
        "## Entropy at temperature 1, over that of BF16 on the same copy",
        markdown_table(
            ["quant", *cuts], [[quant, *(times(ratio(of, quant)) for of in cuts.values())] for quant in others(answers)]
        ),
        "## Entropy at temperature 1 by tenth of a completion, minus that of BF16, nats a token",
        markdown_table(
            ["quant", *(f"tenth {part + 1}" for part in range(PARTS)), "last minus first"],
            [[quant, *in_nats(probes, quant)] for quant in others(answers)],
        ),
        "## Right, of finished answers",
        markdown_table(
            ["quant", "temperature", "difference to BF16, points"],
            [
                [quant, f"{at:g}", points(gap(answers[answers["temperature"] == at], quant), 1, signed=True)]
                for quant in others(answers)
                for at in temperatures
            ],
        ),
        "## Greedy answers that a limit of tokens would cut off",
        markdown_table(
            ["quant", *(f"{limit}" for limit in LIMITS)],
            [
                [quant, *(f"{cut_off(answers, quant, limit):.1%}" for limit in LIMITS)]
                for quant in ("bf16", *others(answers))
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def in_nats(probes: Sequence[Record], quant: str) -> list[str]:
    """The rise in each tenth, and how much larger it is in the last than in the first."""
    units = measured_in(quant, probes)
    rises = np.array(
        [
            [entropy_of_part(part)(one, quant) - entropy_of_part(part)(one, "bf16") for part in range(PARTS)]
            for one in units
        ]
    )  # (copies, tenths)
    slope = mean_ci((rises[:, -1] - rises[:, 0]).tolist())
    return [*(f"{rise:+.3f}" for rise in rises.mean(0)), bracketed(slope, "{:+.3f}")]


def others(answers: Any) -> list[str]:
    return [quant for quant in answers["quant"].unique() if quant != "bf16"]


def by_token(answers: Any) -> Any:
    """Nats a token, (copies, formats)."""
    sums = answers.groupby(["base", "quant"])[["entropy", "tokens"]].sum()
    return (sums["entropy"] / sums["tokens"]).unstack()


def by_answer(answers: Any) -> Any:
    """The median answer's nats a token, (copies, formats)."""
    each = answers.assign(each=answers["entropy"] / answers["tokens"])
    return each.groupby(["base", "quant"])["each"].median().unstack()


def ratio(of: Any, quant: str) -> Estimate:
    pairs = of[[quant, "bf16"]].dropna()
    return mean_ci(np.log(pairs[quant] / pairs["bf16"]).tolist())


def gap(answers: Any, quant: str) -> Estimate:
    right = answers[answers["finished"]].groupby(["base", "quant"])["correct"].mean().unstack()
    pairs = right[[quant, "bf16"]].dropna()
    return mean_ci((pairs[quant] - pairs["bf16"]).tolist())


def cut_off(answers: Any, quant: str, limit: int) -> float:
    greedy = answers[(answers["temperature"] == 0) & (answers["quant"] == quant)]
    return float(((greedy["tokens"] > limit) | ~greedy["finished"]).mean())


if __name__ == "__main__":
    guarded(main)
