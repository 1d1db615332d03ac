"""The page of a study: its own contrasts and curves, verdicts, effects behind them, paired differences, doses, runs.

Every number is that of claims/ and study/, computed here once; the script of the page filters and draws. Without it the
page is all of its tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl_core.checks import require
from qerl_studies.claims.claim import ClaimResult, ContrastResult
from qerl_studies.claims.estimate import Comparison
from qerl_studies.claims.evaluate import evaluate_claims
from qerl_studies.claims.match import Contrast
from qerl_studies.claims.registry import shown_claims
from qerl_studies.figures.style import format_order
from qerl_studies.report.axes import AXES, _is_number, axis_of
from qerl_studies.report.claims_page import Results, content, label_of, row_of
from qerl_studies.report.doses import DOSES, doses_of
from qerl_studies.report.own_runs import own_content
from qerl_studies.report.page import colors, page
from qerl_studies.runs.environments import CLASS
from qerl_studies.runs.load import Run
from qerl_studies.runs.settings import by_scope
from qerl_studies.tables import terminal

MOST_RUNS = 3_000  # of one page: about 3 MB
COLUMNS = {  # of the table of runs: heading, name in qerl_studies/tables/terminal.py, format
    "accuracy at step 0": ("greedy_start", ".1%"),
    "greedy": ("greedy_final", ".1%"),
    "lenient at step 0": ("lenient_start", ".1%"),
    "lenient": ("lenient_final", ".1%"),
    "sampled": ("sampled_final", ".1%"),
    "entropy, first": ("entropy_first", ".3f"),
    "entropy, last": ("entropy_last", ".3f"),
    "taught": ("taught", ".2f"),
    "tokens/s": ("rollout_tok_s", ",.0f"),
    "peak GiB": ("peak_gib", ".2f"),
}


def evaluated(title: str, runs: Sequence[Run]) -> Results:
    """The verdicts. ConfigError if claims cannot be evaluated, or if there are more runs than a page can show."""
    require(
        len(runs) <= MOST_RUNS,
        f"{title} has {len(runs):,} runs, more than one page can show ({MOST_RUNS:,}). Pass some of its folders, "
        "or the studies one by one",
    )
    return {scope: evaluate_claims(shown_claims(), group) for scope, group in by_scope(runs).items()}


def verdict_counts(results: Results) -> dict[tuple[str, str], int]:
    """How many claims have each verdict."""
    counts = Counter((result.verdict, result.state.kind) for of_scope in results.values() for result in of_scope)
    return dict(sorted(counts.items()))


def study_page(
    title: str,
    runs: Sequence[Run],
    results: Results,
    viewers: Mapping[str, str],
    refresh_s: int | None = None,
    left_out: Mapping[str, str] | None = None,
) -> str:
    """The page of `runs`; `viewers` has the address of each run's samples. With `refresh_s` it loads itself again.

    `left_out` says why others could not be read, by their names.
    """
    place = {run.path: number for number, run in enumerate(runs)}
    rows = [_run(run, viewers.get(run.name, "")) for run in runs]
    effects = list(_effects(results, place))
    formats = sorted({row["axes"]["format"] for row in rows}, key=lambda name: (format_order(name), name))
    known = {axis: sorted({row["axes"][axis] for row in rows}, key=_by_size) for axis in AXES}
    data = {
        "title": title,
        "axes": known,
        "colors": colors(formats),
        "claims": [_claim(number, claim) for number, claim in enumerate(shown_claims(), start=1)],
        "scopes": [*results],
        "runs": rows,
        "columns": {name: heading for heading, (name, _) in COLUMNS.items()},
        "effects": effects,
        "doses": doses_of([run for run in runs if run.finished], place),
        "dose_measures": [*DOSES],
    }
    return page(
        "study",
        data,
        title=title,
        refresh_s=refresh_s,
        left_out=left_out or {},
        axes=known,
        formats=formats,
        matrix=_matrix(results, effects, formats),
        effects=effects,
        runs=rows,
        run_columns=COLUMNS,
        **content(results, runs),
        **own_content(runs),
    )


def _by_size(value: str) -> tuple[bool, float, str]:
    return (True, 0.0, value) if not value.isdecimal() else (False, float(value), value)


def _run(run: Run, viewer: str) -> dict[str, Any]:
    row = terminal.row_of(run)
    shown = {name: format(row[name], form) if _is_number(row[name]) else "-" for name, form in COLUMNS.values()}
    return {
        "name": run.name,
        "viewer": viewer,
        "state": "finished" if run.finished else f"step {run.last_step} of {run.option('steps')}",
        "axes": {axis: str(axis_of(run.config_items, key)) for axis, key in AXES.items()},
        "lr": f"{run.option('optim.lr'):g}",
        "seed": run.option("seed"),
        "base": run.base,
        "numbers": {name: row[name] if _is_number(row[name]) else None for name, _ in COLUMNS.values()},
        "shown": shown,
    }


def _claim(number: int, claim: Any) -> dict[str, Any]:
    sign = -1 if claim.expected == "less" else 1
    return {
        "number": number,
        "title": claim.title,
        "unit": "%" if claim.measure.ratio else claim.measure.unit,
        "margin": claim.measure.on_axis(claim.measure.margin),
        "paper": [sign * effect / claim.measure.margin for effect in claim.reported_effects],
        "paper_on_axis": [claim.measure.on_axis(effect) for effect in claim.reported_effects],
    }


def _effects(results: Results, place: Mapping[Path, int]) -> Iterator[dict[str, Any]]:
    """One entry for each comparison, and for each contrast that votes without one."""
    for scope, (name, of_scope) in enumerate(results.items()):
        for number, claim_result in enumerate(of_scope):
            for result in claim_result.contrasts:
                shared = {"claim": number, "scope": scope, "verdict": claim_result.verdict}
                for comparison in result.comparisons:
                    yield shared | _effect(claim_result, result, comparison, place)
                if not result.primary and result.contrast.votes:
                    yield shared | _no_effect(name, claim_result, result)


def _no_effect(scope: str, claim_result: ClaimResult, result: ContrastResult) -> dict[str, Any]:
    """A contrast that votes, and has no runs in its primary setting."""
    model, _, task = scope.removesuffix(f", {CLASS}").partition(" on ")
    conditions = (*claim_result.claim.where, *claim_result.claim.primary, *result.contrast.arms[0].where)
    asked = [one.among[0] for one in conditions if one.key == "quant.name" and len(one.among) == 1]
    axes = {"model": [model], "task": [task], **({"format": [str(asked[-1])]} if asked else {})}
    cells = (result.contrast.label, "-", "primary", "-", result.reason, "-")
    return {"cells": cells, "role": "primary", "axes": axes, "status": result.status, "reason": result.reason}


def _effect(
    claim_result: ClaimResult, result: ContrastResult, comparison: Comparison, place: Mapping[Path, int]
) -> dict[str, Any]:
    claim, stratum, contrast = claim_result.claim, comparison.stratum, result.contrast
    arms = [stratum.shared | variant for variant in stratum.variants]
    axes = {axis: [*dict.fromkeys(str(axis_of(items, key)) for items in arms)] for axis, key in AXES.items()}
    primary = comparison is result.primary
    role = "primary" if primary else "as published" if contrast.confounded else "robustness"
    entry: dict[str, Any] = {
        "cells": row_of(claim, result, comparison),
        "role": role,
        "axes": axes,
        "status": (result.status or "") if primary else "",
        "reason": (result.reason if primary else "") or comparison.reason,
    }
    if comparison.effect is None:
        return entry
    whole, measure = comparison.effect.whole, claim.measure
    oriented = (-1 if claim.expected == "less" else 1) / measure.margin
    ends = (whole.value, whole.low, whole.high)
    on_axis = [measure.on_axis(end) for end in ends]
    return entry | {
        "label": label_of(result),
        "text": measure.estimate_text(whole),
        "origin": comparison.effect.origin,
        "on_axis": [on_axis[0], *sorted(on_axis[1:])],
        "in_margins": [oriented * ends[0], *sorted(oriented * end for end in ends[1:])],
        "pairs": [
            {
                "base": base,
                "seed": seed,
                "on_axis": measure.on_axis(value),
                "in_margins": oriented * value,
                "runs": _pair(contrast, [place[arm[base, seed].path] for arm in stratum.arms]),
            }
            for (base, seed), value in zip(stratum.cells, comparison.effect.differences.mean().tolist(), strict=True)
        ],
    }


def _pair(contrast: Contrast, numbers: Sequence[int]) -> list[list[int]]:
    """The runs that are added, and those that are subtracted."""
    signed = list(zip(contrast.arms, numbers, strict=True))
    return [[number for arm, number in signed if arm.sign == sign] for sign in (1, -1)]


def _matrix(results: Results, effects: Sequence[Mapping[str, Any]], formats: Collection[str]) -> list[dict[str, Any]]:
    """A row for each claim of each model and task: the verdict, and by format of the treated arm what voted."""
    rows = []
    told = [effect for effect in effects if "text" in effect]
    for number, claim in enumerate(shown_claims()):
        for scope, (name, of_scope) in enumerate(results.items()):
            result = of_scope[number]
            cells: dict[str, list[int]] = {one: [] for one in formats}
            for place, effect in enumerate(effects):
                if effect["claim"] == number and effect["scope"] == scope and effect["role"] == "primary":
                    treated = effect["axes"].get("format", [])[:1]
                    for one in [one for one in formats if not treated or one in treated]:
                        cells[one].append(place)
            rows.append(
                {
                    "claim": number,
                    "scope": scope,
                    "name": name,
                    "title": f"{number + 1}. {claim.title}",
                    "verdict": result.verdict,
                    "reason": result.reason,
                    "class": result.state.kind,
                    "said": any(effect["claim"] == number and effect["scope"] == scope for effect in told),
                    "cells": cells,
                }
            )
    return rows
