"""Verdicts as text: one list of blocks, written as Markdown or as an HTML page that needs nothing beside it."""

from __future__ import annotations

import base64
import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from statistics import fmean
from textwrap import fill

import matplotlib
from matplotlib.figure import Figure

from qerl_bench.results.judge import LEVEL, NO_RUNS, Claim, Judgement, Result
from qerl_bench.results.load import Run
from qerl_bench.results.measure import Measure
from qerl_bench.results.stats import Mean
from qerl_bench.results.style import panels, paper_style

RULES = (
    "Compared are runs whose configs differ in the one factor and in nothing else but the seed; differences are taken "
    "within a seed (and question, for accuracies) first, then averaged over settings, those with the same "
    "numbers counting once. Intervals are at 95 %, Student's "
    "t over seeds, or over seeds and questions. *Supported*: the effect is above zero in the direction claimed. "
    "*Contradicted*: it is below the margin, the smallest effect that would matter, be it reversed or only too small. "
    "A claim that something matters little is supported within the margin and contradicted outside. p-values are "
    "one-sided and adjusted by Holm's method over all contrasts of one model and task; the limit is "
    f"{LEVEL:g}. *p for* is small where the claim holds, *p against* where it is contradicted. Everything else is "
    "*undecided*."
)
PUBLISHED = (
    "Contrasts *as published* are of the paper's own methods, which differ in more than the claim is about; in what, "
    "stands beside them. They may repeat the paper's finding, and cannot say what made it: their p-values are adjusted "
    "among themselves, and they do not enter the verdict on the claim."
)
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem } th { text-align: left }
th, td { border-bottom: 1px solid #ddd; padding: 0.3rem 0.8rem 0.3rem 0; vertical-align: top }
code { background: #f3f3f3; padding: 0.1rem 0.3rem; overflow-wrap: anywhere } h2 { margin-top: 2.5rem }
.supported { color: #00694d } .contradicted { color: #a34700 } .undecided { color: #666 }
img { max-width: 100% } details { font-size: 0.85rem; margin: 0.5rem 0 }
"""
LABEL = 50  # characters of a setting in one line of a figure
VERDICT = re.compile(r"\*\*(supported|contradicted|undecided)\*\*")


@dataclass(frozen=True)
class Heading:
    text: str
    level: int


@dataclass(frozen=True)
class Paragraph:
    text: str  # with **bold**, *emphasis* and `code`


@dataclass(frozen=True)
class Table:
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Folded:
    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Drawing:
    svg: str
    description: str


Block = Heading | Paragraph | Table | Folded | Drawing


def report(judged: dict[str, list[Judgement]], runs: Sequence[Run]) -> list[Block]:
    """All blocks: what was read, a summary, then each claim; `judged` by model and task."""
    blocks: list[Block] = [
        Heading("What these runs say about the claims of QeRL", 1),
        Paragraph(_material(runs)),
        Paragraph(RULES),
    ]
    if any(result.confounders for judgements in judged.values() for one in judgements for result in _shown(one)):
        blocks.append(Paragraph(PUBLISHED))
    for scope, judgements in judged.items():
        blocks += [Heading(scope, 2), summary(judgements)]
        for number, judgement in enumerate(judgements, start=1):
            claim = judgement.claim
            blocks += _section(number, judgement, claim.command if scope.startswith("tiny ") else claim.at_scale)
    return blocks


def summary(judgements: Sequence[Judgement]) -> Table:
    """A row for each contrast; the verdict on a claim stands in its first."""
    rows = []
    for number, judgement in enumerate(judgements, start=1):
        claim = judgement.claim
        for result in _shown(judgement):
            heads = result is judgement.results[0]
            rows.append(
                (
                    f"{number}. {claim.title}: **{judgement.verdict}**" if heads else "",
                    _contrast(result),
                    claim.measure.describe(result.effect) if result.effect else result.reason.split(";")[0],
                    str(result.effect.n) if result.effect else "-",
                    _settings(claim.measure, result),
                    result.verdict,
                    claim.paper if heads else "",
                )
            )
    header = ("claim", "contrast", "effect [95 % interval]", "seeds", "settings (effects in them)", "on the contrast")
    return Table((*header, "the paper"), tuple(rows))


def markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(part for part in map(_markdown, blocks) if part) + "\n"


def page(blocks: Sequence[Block]) -> str:
    """One HTML file: its style is in its head, its figures are in its text."""
    title = next(block.text for block in blocks if isinstance(block, Heading))
    body = "\n".join(map(_html, blocks))
    head = f'<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n<style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


# --- one claim -------------------------------------------------------------------------------------------------------


def _material(runs: Sequence[Run]) -> str:
    unfinished = [run.name for run in runs if not run.finished]
    left_out = f" Not finished and left out ({len(unfinished)}): {', '.join(unfinished)}." if unfinished else ""
    devices, codes = sorted({run.device for run in runs}), sorted({run.code for run in runs})
    read = "1 run was read" if len(runs) == 1 else f"{len(runs)} runs were read"
    return f"{read}, made on {', '.join(devices)} by code {', '.join(codes)}.{left_out}"


def _shown(judgement: Judgement) -> list[Result]:
    """Its results, without contrasts of the paper's methods of which there are no runs."""
    return [r for r in judgement.results if not (r.contrast.confounded and r.reason == NO_RUNS)]


def _contrast(result: Result) -> str:
    return result.contrast.label + (", as published" if result.contrast.confounded else "")


def _settings(measure: Measure, result: Result) -> str:
    """How many there are, and the smallest and the largest effect in them."""
    effects = [part.mean for part in result.parts]
    between = f" ({measure.show(min(effects))} to {measure.show(max(effects))})" if len(effects) > 1 else ""
    return f"{len(effects) or '-'}{between}"


def _section(number: int, judgement: Judgement, command: str) -> list[Block]:
    claim, results = judgement.claim, _shown(judgement)
    blocks: list[Block] = [
        Heading(f"{number}. {claim.title}: {judgement.verdict}", 3),
        Paragraph(
            f"{claim.statement} Measured: {claim.measure.name}; margin {_margin(claim.measure, claim.margin)}. "
            f"Claimed: {claim.expected}."
        ),
        Paragraph(f"The paper: {claim.paper}. {claim.source[0].upper()}{claim.source[1:]}."),
        Table(
            ("contrast", "effect [95 % interval]", "from", "p for", "p against", "verdict"),
            tuple(_row(claim.measure, result) for result in results),
        ),
    ]
    compared = [result for result in results if result.effect]
    if compared:
        drawn = Drawing(_svg(forest(claim.measure, claim.margin, compared)), f"{claim.title}: effects by setting")
        blocks.append(drawn)
        settings = (
            (_contrast(result), label, " / ".join(map(claim.measure.level, levels)), claim.measure.describe(part))
            for result in compared
            for label, levels, part in zip(result.labels, result.levels, result.parts, strict=True)
        )
        header = ("contrast", "setting", "mean of each arm", "effect [95 % interval], not adjusted")
        blocks.append(Table(header, tuple(settings)))
        blocks += [Paragraph(text) for result in compared if (text := _driver(claim, result))]
    for result in compared:
        blocks += [Paragraph(f"Beside it, without a verdict: {name} {_number(mean)}.") for name, mean in result.beside]
    if any(result.effect is None for result in results):
        blocks.append(Paragraph(f"To decide it, run `{command}` and then this report again."))
    used = tuple(line for result in compared for line in _matched(result))
    return [*blocks, Folded("matched runs", used)] if used else blocks


def _row(measure: Measure, result: Result) -> tuple[str, ...]:
    verdict = f"**{result.verdict}**" + (f": {result.reason}" if result.reason else "")
    if result.confounders:
        verdict += f". The arms also differ in {', '.join(result.confounders)}"
    if result.effect is None:
        return _contrast(result), "-", "-", "-", "-", verdict
    asked = f" × {result.questions} questions" if result.questions > 1 else ""
    settings = f", {len(result.parts)} settings" if len(result.parts) > 1 else ""
    seeds = f"{result.effect.n} seed{'s' if result.effect.n > 1 else ''}"
    effect, p_values = measure.describe(result.effect), (_p(result.p_for), _p(result.p_against))
    return _contrast(result), effect, f"{seeds}{asked}{settings}", *p_values, verdict


def _driver(claim: Claim, result: Result) -> str:
    """The setting that moves the average most, and the average without it; empty if that is as good as the same."""
    if len(result.parts) < 3:
        return ""
    without = [fmean(part.mean for part in result.parts if part is not one) for one in result.parts]
    apart = [abs(part.mean - others) for part, others in zip(result.parts, without, strict=True)]
    place = apart.index(max(apart))
    others = f"{claim.measure.show(without[place])} {claim.measure.unit}".strip()
    return (
        f"{_contrast(result)}: of the {len(apart)} settings, {result.labels[place]} moves the average most; the others "
        f"average to {others}."
        if apart[place] > claim.margin
        else ""
    )


def _matched(result: Result) -> list[str]:
    """One line for each arm of each setting: the name of its runs, their seeds in braces."""
    lines = []
    for label, stratum in zip(result.labels, result.strata, strict=True):
        for arm, runs in zip(result.contrast.arms, stratum.arms, strict=True):
            seeds = ",".join(map(str, sorted(runs)))
            seed, run = next(iter(runs.items()))
            name = run.name.replace(f"-s{seed}-", f"-s{{{seeds}}}-")
            names = name if name != run.name else ", ".join(one.name for one in runs.values())
            lines.append(f"{_contrast(result)}, {label}, {arm.label}: {names}")
    return lines


def forest(measure: Measure, margin: float, results: Sequence[Result]) -> Figure:
    """Effects with intervals: each contrast large, its settings small below it; the band is within the margin."""
    rows = []
    for result in results:
        assert result.effect is not None
        rows.append((_contrast(result), result.effect, True))
        if len(result.parts) > 1:
            rows += [(fill(label, LABEL), part, False) for label, part in zip(result.labels, result.parts, strict=True)]
    lines = [label.count("\n") + 1 for label, *_ in rows]
    heights = [sum(lines[:row]) + (lines[row] - 1) / 2 for row in range(len(rows))]  # the middle of each label
    shown = (lambda x: 100 * (math.exp(x) - 1)) if measure.ratio else (lambda x: measure.scale * x)
    with paper_style():
        figure, axes = panels(1, 1, 0.75 + 0.2 * sum(lines), width=6.5)
        ax = axes[0, 0]
        ax.axvspan(shown(-margin), shown(margin), color="#EDEDED", linewidth=0, zorder=0)
        ax.axvline(0, color="#777777", linewidth=0.7, zorder=1)
        for height, (_, mean, whole) in zip(heights, rows, strict=True):
            low, high = (shown(mean.mean if mean.n == 1 else end) for end in (mean.low, mean.high))
            colour = "#000000" if whole else "#0072B2"
            ax.plot([low, high], [height, height], color=colour, linewidth=1.6 if whole else 0.9)
            hollow = "white" if mean.n == 1 else colour
            ax.plot(shown(mean.mean), height, "D" if whole else "o", color=colour, markerfacecolor=hollow, markersize=4)
        ax.set_yticks(heights, [label for label, *_ in rows])
        ax.set_ylim(sum(lines) - 0.4, -0.6)
        ax.grid(False, axis="y")
        unit = "difference in %" if measure.ratio else f"difference in {measure.unit}"
        ax.set_xlabel(f"{unit} (grey: within the margin)")
    return figure


def _svg(figure: Figure) -> str:
    buffer = BytesIO()
    with paper_style(), matplotlib.rc_context({"svg.hashsalt": "claims"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue().decode()


def _margin(measure: Measure, margin: float) -> str:
    return f"{measure.show(margin).removeprefix('+')} {measure.unit}".strip()


def _number(mean: Mean) -> str:
    alike = "a single seed" if mean.n == 1 else f"the same in all {mean.n} seeds"
    interval = f" [{mean.low:+.3f}, {mean.high:+.3f}]" if mean.error > 0 else f" ({alike})"
    return f"{mean.mean:+.3f}{interval}"


def _p(value: float) -> str:
    return "-" if value != value else "< 0.001" if value < 0.001 else f"{value:.3f}"


# --- writing ---------------------------------------------------------------------------------------------------------


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Paragraph(text):
            return text
        case Table(header, rows):
            lines = [header, ("---",) * len(header), *rows]
            return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
        case Folded(title, lines):
            return (
                f"<details><summary>{title}</summary>\n\n" + "\n".join(f"- {line}" for line in lines) + "\n\n</details>"
            )
        case Drawing():
            return ""  # a page of text: the numbers of the figure stand in the tables


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            verdict = text.rsplit(": ", 1)[-1]
            return f'<h{level} class="{verdict if " " not in verdict else ""}">{html.escape(text)}</h{level}>'
        case Paragraph(text):
            return f"<p>{_inline(text)}</p>"
        case Table(header, rows):
            head = "".join(f"<th>{_inline(cell)}</th>" for cell in header)
            body = "\n".join(f"<tr>{''.join(f'<td>{_inline(cell)}</td>' for cell in row)}</tr>" for row in rows)
            return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"
        case Folded(title, lines):
            items = "\n".join(f"<li>{_inline(line)}</li>" for line in lines)
            return f"<details><summary>{html.escape(title)}</summary>\n<ul>\n{items}\n</ul>\n</details>"
        case Drawing(svg, description):
            data = base64.b64encode(svg.encode()).decode()
            return f'<img alt="{html.escape(description)}" src="data:image/svg+xml;base64,{data}">'


def _inline(text: str) -> str:
    escaped = html.escape(text, quote=False)
    marked = VERDICT.sub(r'<strong class="\1">\1</strong>', escaped)
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", marked)
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", marked)
