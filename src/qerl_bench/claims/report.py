"""Verdicts as text: one list of blocks, written as Markdown or as an HTML page that needs nothing beside it."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from qerl_bench.claims.estimate import Effect, Setting
from qerl_bench.claims.gates import diverged_arms
from qerl_bench.claims.judge import DIRECTION, NO_RUNS, SMALLNESS, Claim, Judgement, Result, Verdict
from qerl_bench.figures.forest import all_claims, one_claim, svg
from qerl_bench.statistics import Mean
from qerl_bench.study.load import Run

RULES = (
    "Each claim is decided by one primary contrast, in the one setting that the registry names: runs whose configs "
    "differ in the one factor and in nothing else but base model and seed, on one machine with one set of libraries. "
    "Differences are taken within base and seed (and question, for accuracies). Several bases are the unit, and the "
    "effect is their mean; of one base, its seeds are. Intervals are at 95 %, Student's t, not adjusted. *Supported*: "
    "the effect is in the direction claimed. *Reversed*: it is in the other one. *Negligible*: it lies within the "
    "margin, the smallest effect that would matter; an effect can be there and negligible. A claim that something "
    "matters little is "
    "supported within the margin and reversed outside of it. *Not testable here*: a gate failed, so the comparison "
    "could not have shown the effect. *Incomplete*: runs are missing. *Undecided*: everything else, with the smallest "
    "effect that would have been found with a probability of 80 %. p-values are adjusted by Holm's method over the "
    f"claims of one model and task; the limits are {DIRECTION:g} (two-sided) for a direction and {SMALLNESS:g} for an "
    "effect within the margin."
)
PUBLISHED = (
    "Contrasts *as published* are of the paper's own methods, which differ in more than the claim is about; in what, "
    "stands beside them. They may repeat the paper's finding, and cannot say what made it: they do not vote."
)
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem } th { text-align: left }
th, td { border-bottom: 1px solid #ddd; padding: 0.3rem 0.8rem 0.3rem 0; vertical-align: top }
code { background: #f3f3f3; padding: 0.1rem 0.3rem; overflow-wrap: anywhere } h2 { margin-top: 2.5rem }
.supported { color: #00694d } .reversed { color: #a34700 } .negligible { color: #0b5394 } .open { color: #666 }
img { max-width: 100% } details { font-size: 0.85rem; margin: 0.5rem 0 }
"""
VERDICT = re.compile(rf"\*\*({'|'.join(get_args(Verdict))})\*\*")
DECIDED = ("supported", "reversed", "negligible")


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
        if any(_compared(judgement.voting) for judgement in judgements):
            blocks.append(Drawing(svg(all_claims(judgements, scope)), "All claims: effect over margin"))
        for number, judgement in enumerate(judgements, start=1):
            claim = judgement.claim
            blocks += _section(number, judgement, claim.command if scope.startswith("tiny ") else claim.at_scale)
    return blocks


def summary(judgements: Sequence[Judgement]) -> Table:
    """A row for each contrast that votes; the verdict on a claim stands in its first."""
    rows = []
    for number, judgement in enumerate(judgements, start=1):
        claim = judgement.claim
        for result in judgement.voting:
            heads = result is judgement.voting[0]
            effect = _effect(result)
            rows.append(
                (
                    f"{number}. {claim.title}: **{judgement.verdict}**" if heads else "",
                    result.contrast.label,
                    claim.measure.describe(effect.whole) if effect else "-",
                    effect.origin if effect else "-",
                    _detectable(judgement) if heads else "",
                    judgement.reason if heads else "",
                    claim.paper if heads else "",
                )
            )
    header = ("claim", "primary contrast", "effect [95 % interval]", "from", "detectable", "why", "the paper")
    return Table(header, tuple(rows))


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
    codes, blocks = sorted({run.code for run in runs}), sorted({run.block for run in runs})
    bases = len({run.base for run in runs})
    read = "1 run was read" if len(runs) == 1 else f"{len(runs)} runs were read"
    based = f"{bases} base models" if bases > 1 else "one base model, for which alone the intervals speak"
    return f"{read}, of {based}, made by code {', '.join(codes)} on: {'; '.join(blocks)}.{left_out}"


def _shown(judgement: Judgement) -> list[Result]:
    """Its results, without contrasts that do not vote and of which there are no runs."""
    return [result for result in judgement.results if result.contrast.votes or result.reason != NO_RUNS]


def _compared(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if any(setting.effect for setting in result.settings)]


def _effect(result: Result) -> Effect | None:
    return result.primary.effect if result.primary else None


def _contrast(result: Result) -> str:
    return result.contrast.label + (", as published" if result.contrast.confounded else "")


def _detectable(judgement: Judgement) -> str:
    effect = judgement.detectable
    return judgement.claim.measure.size(effect) if effect == effect else "-"


def _section(number: int, judgement: Judgement, command: str) -> list[Block]:
    claim, results = judgement.claim, _shown(judgement)
    blocks: list[Block] = [
        Heading(f"{number}. {claim.title}: {judgement.verdict}", 3),
        Paragraph(
            f"{claim.statement} Measured: {claim.measure.name}; margin {claim.measure.size(claim.margin)}. "
            f"Claimed: {claim.expected}."
        ),
        Paragraph(f"The paper: {claim.paper}. {claim.source[0].upper()}{claim.source[1:]}."),
        Paragraph(f"**{judgement.verdict}**{f': {judgement.reason}' if judgement.reason else ''}.{_power(judgement)}"),
    ]
    compared = _compared(results)
    if compared:
        blocks.append(Drawing(svg(one_claim(judgement)), f"{claim.title}: effects by setting"))
        rows = (
            (_contrast(result), *_row(claim, setting, "primary" if setting is result.primary else "robustness"))
            for result in compared
            for setting in result.settings
        )
        header = ("contrast", "setting", "role", "mean of each arm", "effect [95 % interval], not adjusted", "from")
        blocks.append(Table(header, tuple(rows)))
        blocks += [Paragraph(text) for result in compared if (text := _bases(claim, result))]
    differing = [
        f"{_contrast(result)}: the arms also differ in {', '.join(result.confounders)}."
        for result in compared
        if result.confounders
    ]
    blocks += [Paragraph(text) for text in differing]
    for result in compared:
        blocks += [Paragraph(f"Beside it, without a verdict: {name} {_number(mean)}.") for name, mean in result.beside]
    if any(result.status for result in judgement.voting):
        blocks.append(Paragraph(f"Runs that could decide it: `{command}`, and then this report again."))
    used = tuple(line for result in compared for line in _matched(result))
    return [*blocks, Folded("matched runs", used)] if used else blocks


def _power(judgement: Judgement) -> str:
    """What this study could have seen, and how large one would have to be; nothing where no test was made."""
    if judgement.detectable != judgement.detectable:
        return ""
    effects = [effect for result in judgement.voting if (effect := _effect(result))]
    margin, unit = judgement.claim.measure.size(judgement.claim.margin), effects[0].unit
    found = f" Smallest effect that would be found with a probability of 80 %: {_detectable(judgement)}"
    if judgement.verdict != "undecided":
        return f"{found}."
    asked = any(effect.whole.fixed > 0 for effect in effects)
    without = f"more questions, or more {unit}s than 4,096" if asked else f"more than 4,096 {unit}s"
    many = f"{judgement.needed} {unit}s" if judgement.needed else without
    return f"{found}; one of {margin} would need {many}."


def _row(claim: Claim, setting: Setting, role: str) -> tuple[str, ...]:
    lost = diverged_arms(setting)
    label = setting.label + (f" (diverged, reported apart: {', '.join(lost)})" if lost else "")
    if setting.effect is None:
        return label, role, "-", setting.reason, "-"
    levels = " / ".join(map(claim.measure.level, setting.levels))
    return label, role, levels, claim.measure.describe(setting.effect.whole), setting.effect.origin


def _bases(claim: Claim, result: Result) -> str:
    """Effects by base, their spread, and where that of one more base would lie."""
    effect = _effect(result)
    if effect is None or effect.bases is None:
        return ""
    bases, show = effect.bases, claim.measure.show
    each = ", ".join(show(mean.mean) for mean in bases.by_base)
    ahead = (
        f"; one more base of as many seeds would lie in {claim.measure.between(*bases.prediction)}"
        if bases.prediction
        else ""
    )
    spread = f"{bases.between:.3g}" if claim.measure.ratio else f"{claim.measure.scale * bases.between:.3g}"
    unit = "of its logarithm" if claim.measure.ratio else claim.measure.unit
    return f"{_contrast(result)} by base: {each}. Standard deviation between bases {spread} {unit}{ahead}."


def _matched(result: Result) -> list[str]:
    """One line for each arm of each setting: the name of its runs, their seeds in braces."""
    lines = []
    for setting in result.settings:
        for arm, runs in zip(result.contrast.arms, setting.stratum.arms, strict=True):
            seeds = ",".join(map(str, sorted({seed for _, seed in runs})))
            names = dict.fromkeys(run.name.replace(f"-s{seed}-", f"-s{{{seeds}}}-") for (_, seed), run in runs.items())
            lines.append(f"{_contrast(result)}, {setting.label}, {arm.label}: {', '.join(names)}")
    return lines


def _number(mean: Mean) -> str:
    alike = "a single seed" if mean.n == 1 else f"the same in all {mean.n} repetitions"
    interval = f" [{mean.low:+.3f}, {mean.high:+.3f}]" if mean.error > 0 else f" ({alike})"
    return f"{mean.mean:+.3f}{interval}"


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
            return f"<h{level}{_class(verdict) if level == 3 else ''}>{html.escape(text)}</h{level}>"
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
    marked = VERDICT.sub(lambda found: f"<strong{_class(found[1])}>{found[1]}</strong>", escaped)
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", marked)
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", marked)


def _class(verdict: str) -> str:
    word = verdict.split(" ")[0]
    return f' class="{word if word in DECIDED else "open"}"'
