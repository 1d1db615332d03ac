"""Verdicts as a table for programs: `qerl_bench.claims`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from qerl_studies.claims.claim import Claim, is_touched
from qerl_studies.claims.evaluate import evaluate_claims
from qerl_studies.runs.load import Run
from qerl_studies.runs.settings import by_scope

COLUMNS = (
    *("scope", "number", "claim", "verdict", "word", "contrast", "effect", "low", "high", "n", "unit"),
    *("measure", "ratio", "margin", "p", "reason"),
)


def claim_table(claims: Sequence[Claim], runs: Sequence[Run], everything: bool) -> pd.DataFrame:
    """A row for each contrast that votes. `effect` and its interval are those of the primary setting, in units of the
    measure, or the logarithm of a `ratio`; NaN without one. `n` counts `unit`s, bases or seeds. `p` is that of the
    verdict's direction, adjusted for all claims.
    """
    rows = []
    for scope, group in by_scope(runs).items():
        for number, result in enumerate(evaluate_claims(claims, group), start=1):
            if not (everything or is_touched(result)):
                continue
            measure = result.claim.measure
            verdict = {"scope": scope, "number": number, "claim": result.claim.title, "verdict": result.verdict}
            more = {"word": result.word, "measure": measure.name, "ratio": measure.ratio, "margin": measure.margin}
            for one in result.voting:
                whole = one.effect.whole if one.effect else None
                ends = (whole.low, whole.high) if whole and whole.has_interval else (math.nan, math.nan)
                numbers = {"effect": whole.value if whole else math.nan, "low": ends[0], "high": ends[1]}
                units = {"n": whole.n if whole else 0, "unit": one.effect.unit if one.effect else ""}
                told = {"contrast": one.contrast.label, "p": result.p_direction, "reason": result.reason}
                rows.append({**verdict, **more, **numbers, **units, **told})
    return pd.DataFrame(rows, columns=COLUMNS)
