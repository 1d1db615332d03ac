"""The verdicts in words: claims.md, and what the study page (report/study_page.py) says about each claim."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from qerl_core.statistics import Estimate
from qerl_studies.claims.claim import NO_RUNS, Claim, ClaimResult, ContrastResult, greedy_text
from qerl_studies.claims.estimate import Comparison
from qerl_studies.claims.evaluate import DIRECTION, SMALLNESS
from qerl_studies.claims.preconditions import diverged_arms
from qerl_studies.effects.state import WORDS
from qerl_studies.runs.load import Run
from qerl_studies.tables.markdown import markdown_table
from qerl_studies.tables.paper import Table
from qerl_studies.tables.templates import templates

Results = Mapping[str, Sequence[ClaimResult]]  # by model and task
SUMMARY = ("claim", "primary contrast", "effect [95 % interval]", "greedy", "from", "detectable", "why", "the paper")
LATER = ("paper", "claim", "experiment", "verdict", "effect [95 % interval]")
COMPARISONS = ("contrast", "setting", "role", "mean of each arm", "effect [95 % interval], not adjusted", "from")


def markdown(results: Results, runs: Sequence[Run], unread: Collection[Path] = ()) -> str:
    """The text of claims.md; `results` are by model and task, `unread` are runs that cannot be read."""
    environment = templates("qerl_studies.report")
    environment.filters["cell"] = lambda text: text.replace("|", "/")
    return environment.get_template("claims.md").render(content(results, runs, unread))


def content(results: Results, runs: Sequence[Run], unread: Collection[Path] = ()) -> dict[str, Any]:
    """What the templates of a report are filled with."""
    scopes = [_scope(name, scope_results) for name, scope_results in results.items()]
    papers = dict.fromkeys(one.claim.paper for of_scope in results.values() for one in of_scope)
    return {
        "whose": " and ".join(papers) or "QeRL",
        "material": _material(runs, unread),
        "direction": f"{DIRECTION:g}",
        "smallness": f"{SMALLNESS:g}",
        "published": any(claim["differing"] for scope in scopes for claim in scope["claims"]),
        "scopes": scopes,
        "words": WORDS,
        "summary_header": SUMMARY,
        "comparisons_header": COMPARISONS,
    }


def summary_text(results: Sequence[ClaimResult], told: Sequence[ClaimResult] | None = None) -> str:
    """The summary table as Markdown, for the terminal; of all `results`, or of those that are `told`."""
    numbers = [number for number, one in enumerate(results, start=1) if told is None or one in told]
    shown = [row for row in _summary(results) if row["number"] in numbers]
    rows = [(f"{row['title']}: {row['verdict']}" if row["title"] else "", *row["cells"]) for row in shown]
    return markdown_table(SUMMARY, rows)


def verdict_table(name: str, scope: str, results: Sequence[ClaimResult], whose: str = "QeRL") -> Table:
    """The verdicts for a paper: a line for each contrast that votes and has runs, with its interval."""
    shown, numbers = [], []
    for number, claim_result in enumerate(results, start=1):
        measure = claim_result.claim.measure
        for result in claim_result.voting:
            effect = result.effect
            if effect is None:
                continue
            title = f"{number}. {claim_result.claim.title}"
            same = {"claim": title, "verdict": claim_result.verdict, "contrast": result.contrast.label}
            again = result is not claim_result.voting[0] and bool(shown) and numbers[-1]["claim"] == title
            shown.append(
                {name: "" if again and name != "contrast" else text for name, text in same.items()}
                | {"effect": measure.estimate_text(effect.whole), "n": effect.whole.n}
            )
            ends = {"effect": effect.whole.value, "low": effect.whole.low, "high": effect.whole.high}
            scale = "logarithm of a ratio" if measure.ratio else measure.name
            numbers.append(same | ends | {"n": effect.whole.n, "unit": scale, "p": claim_result.p_direction})
    none = "" if shown else " No runs decide any of them."
    caption = (
        f"Verdicts on the claims of {whose}: {scope}.{none} Effects are means over n paired units with 95 % intervals "
        f"(Student's t, questions of answers drawn, not adjusted); verdicts at {DIRECTION:g} over all claims (Holm)."
    )
    columns = ("claim", "verdict", "contrast", "effect", "n")
    wide = (*columns[:4], "low", "high", "n", "unit", "p")
    return Table(name, pd.DataFrame(numbers, columns=wide), pd.DataFrame(shown, columns=columns), caption)


def page_table(results: Sequence[ClaimResult]) -> str:
    """A Markdown table: paper, claim, the command that makes its runs, the verdict on each, and its effects."""
    rows = [
        (f"{claim.paper} ({claim.address})", claim.title, f"`{claim.command}`", *verdict_cells(result))
        for result in results
        for claim in [result.claim]
    ]
    return markdown_table(LATER, rows) + "\n"


def beside(result: ClaimResult) -> str:
    """The verdict in the words of effects/state.py, in brackets, if its own are others."""
    return f" ({result.word})" if result.word != result.verdict else ""


def verdict_cells(result: ClaimResult) -> tuple[str, str]:
    """The verdict with its reason, and the effects of the contrasts that vote."""
    effects = [
        f"{one.contrast.label}: {result.claim.measure.estimate_text(one.primary.effect.whole)}"
        + (f", greedy {greedy_text(result, one)}" if result.greedy else "")
        for one in result.voting
        if one.primary and one.primary.effect
    ]
    verdict = f"**{result.verdict}**{beside(result)}" + (", exploratory" if result.claim.exploratory else "")
    reason = f": {result.reason}" if result.reason else ""
    return f"{verdict}{reason}", "; ".join(effects) or "-"


def _material(runs: Sequence[Run], unread: Collection[Path]) -> str:
    """Which runs were read."""
    unfinished = [run.name for run in runs if not run.finished]
    left_out = f" Unfinished and left out ({len(unfinished)}): {', '.join(unfinished)}." if unfinished else ""
    if unread:
        names = ", ".join(sorted(path.name for path in unread))
        left_out += f" Left out, because they cannot be read ({len(unread)}): {names}."
    codes, blocks = sorted({run.code for run in runs}), sorted({run.block for run in runs})
    bases = len({run.base for run in runs})
    models = f"{bases} base models" if bases > 1 else "one base model, so the intervals hold for it alone"
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    return f"{count} of {models}. Code: {', '.join(codes)}. Machines: {'; '.join(blocks)}.{left_out}"


def _scope(name: str, results: Sequence[ClaimResult]) -> dict[str, Any]:
    return {
        "name": name,
        "summary": _summary(results),
        "claims": [_claim(number, result, name.startswith("tiny ")) for number, result in enumerate(results, start=1)],
    }


def _summary(results: Sequence[ClaimResult]) -> list[dict[str, Any]]:
    """A row for each contrast that votes; the verdict on a claim is in its first row."""
    rows = []
    for number, claim_result in enumerate(results, start=1):
        claim = claim_result.claim
        for result in claim_result.voting:
            first = result is claim_result.voting[0]
            effect = result.effect
            cells = (
                result.contrast.label,
                claim.measure.estimate_text(effect.whole) if effect else "-",
                greedy_text(claim_result, result),
                effect.origin if effect else "-",
                _detectable(claim_result) if first else "",
                claim_result.reason if first else "",
                claim.reported if first else "",
            )
            title = f"{number}. {claim.title}" if first else ""
            rows.append(
                {"number": number, "title": title, "verdict": claim_result.verdict, "beside": beside(claim_result)}
                | {"cells": cells}
            )
    return rows


def _claim(number: int, result: ClaimResult, built_in: bool) -> dict[str, Any]:
    """One section of the page. Contrasts without a vote and without runs are left out."""
    claim = result.claim
    shown = [one for one in result.contrasts if one.contrast.votes or one.reason != NO_RUNS]
    compared = [one for one in shown if any(comparison.effect for comparison in one.comparisons)]
    return {
        "number": number,
        "claim": claim,
        "margin": claim.measure.size_text(claim.measure.margin),
        "source": claim.source[0].upper() + claim.source[1:],
        "verdict": result.verdict,
        "kind": result.state.kind,
        "beside": beside(result),
        "reason": result.reason,
        "power": _power(result),
        "greedy": [
            f"{label_of(one)} {greedy_text(result, one)}" for one in result.voting if result.greedy and one.effect
        ],
        "rows": [row_of(claim, one, comparison) for one in compared for comparison in one.comparisons],
        "bases": [text for one in compared if (text := _bases(claim, one))],
        "differing": [f"{label_of(one)}: {', '.join(one.confounders)}" for one in compared if one.confounders],
        "additional": [f"{name} {_additional(mean)}" for one in compared for name, mean in one.additional],
        "command": (claim.command if built_in else claim.at_scale) if any(one.status for one in result.voting) else "",
        "matched": [line for one in compared for line in _matched(one)],
    }


def label_of(result: ContrastResult) -> str:
    return result.contrast.label + (", as published" if result.contrast.confounded else "")


def _detectable(result: ClaimResult) -> str:
    return result.claim.measure.size_text(result.detectable) if result.detectable == result.detectable else "-"


def _power(result: ClaimResult) -> str:
    """What this study could have found, and how large one would have to be; empty if no test was made."""
    if result.detectable != result.detectable:
        return ""
    effects = [effect for one in result.voting if (effect := one.effect)]
    text = f"Smallest effect that would be found with a probability of 80 %: {_detectable(result)}"
    if result.verdict != "undecided":
        return f"{text}."
    unit = effects[0].unit
    with_questions = any(effect.whole.stderr_questions for effect in effects)
    too_many = f"more questions, or more {unit}s than 4,096" if with_questions else f"more than 4,096 {unit}s"
    needed = f"{result.needed} {unit}s" if result.needed else too_many
    return f"{text}; one of {result.claim.measure.size_text(result.claim.measure.margin)} would need {needed}."


def row_of(claim: Claim, result: ContrastResult, comparison: Comparison) -> tuple[str, ...]:
    diverged = diverged_arms(comparison)
    setting = comparison.label + (f" (diverged: {', '.join(diverged)})" if diverged else "")
    role = "primary" if comparison is result.primary else "robustness"
    if comparison.effect is None:
        return label_of(result), setting, role, "-", comparison.reason, "-"
    levels = " / ".join(map(claim.measure.level_text, comparison.effect.levels))
    estimate = claim.measure.estimate_text(comparison.effect.whole)
    return label_of(result), setting, role, levels, estimate, comparison.effect.origin


def _bases(claim: Claim, result: ContrastResult) -> str:
    """Effects by base, their spread, and the prediction for one more base."""
    effect = result.effect
    if effect is None or effect.unit != "base":
        return ""
    measure = claim.measure
    each = ", ".join(measure.text(base.value) for base in effect.by_base)
    spread, unit = (
        (effect.between, "of its logarithm") if measure.ratio else (measure.scale * effect.between, measure.unit)
    )
    text = f"{label_of(result)} by base: {each}. Standard deviation between bases: {spread:.3g} {unit}."
    if effect.prediction:
        text += f" Prediction interval for one more base of as many seeds: {measure.interval_text(*effect.prediction)}."
    return text


def _matched(result: ContrastResult) -> list[str]:
    """One line for each arm of each setting: the names of its runs, with seeds, and ends that differ, in braces."""
    lines = []
    for comparison in result.comparisons:
        for arm, runs in zip(result.contrast.arms, comparison.stratum.arms, strict=True):
            seeds = ",".join(map(str, sorted({seed for _, seed in runs})))
            names: dict[str, dict[str, None]] = {}
            for (_, seed), run in runs.items():
                stem, _, end = run.name.replace(f"-s{seed}-", f"-s{{{seeds}}}-").rpartition("-")
                names.setdefault(stem, {})[end] = None
            told = [
                f"{stem}-{{{','.join(ends)}}}" if len(ends) > 1 else f"{stem}-{min(ends)}"
                for stem, ends in names.items()
            ]
            lines.append(f"{label_of(result)}, {comparison.label}, {arm.label}: {', '.join(told)}")
    return lines


def _additional(mean: Estimate) -> str:
    text = mean.text("{:+.3f}".format)
    return text if mean.has_interval else f"{text} ({mean.alike})"
