"""The contrasts that are in runs as a table for programs, a row for each number: `qerl_bench.effects`.

The page of a study shows the same ones (own_runs.py). Left out: gates, and corrections for how many one looks at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from qerl_studies.effects.pairs import mixed_machines
from qerl_studies.figures.headline import HEADLINES, common_cells, compared
from qerl_studies.runs.load import Run
from qerl_studies.runs.own_contrasts import OwnContrast, own_contrasts
from qerl_studies.runs.settings import by_scope, group_by_setting

COLUMNS = (
    *("scope", "factor", "contrast", "where", "number", "metric", "effect", "low", "high"),
    *("n", "unit", "pairs", "margin", "word", "correlation", "mixed_machines"),
)


def effect_table(runs: Sequence[Run]) -> pd.DataFrame:
    """`effect` is the first arm of `contrast` minus the second, in units of the metric; `n` counts `unit`s.

    `margin` is the smallest effect that matters, NaN if none was named. `word` is what the interval leaves,
    `correlation` that of the two arms over units. Empty, with its columns, if no two arms are comparable.
    """
    finished = [run for run in runs if run.finished]
    rows = [
        row
        for scope, group in by_scope(finished).items()
        for contrast in own_contrasts(group_by_setting(group))
        for row in _rows(scope, contrast)
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def _rows(scope: str, contrast: OwnContrast) -> Iterator[dict[str, Any]]:
    first, second = contrast.treated.by_cell, contrast.control.by_cell
    common = common_cells(first, second)
    mixed = bool(mixed_machines([{cell: arm[cell] for cell in common} for arm in (first, second)]))
    for headline in HEADLINES:
        whole = (comparison := compared(first, second, headline)).difference
        if whole is None:
            continue
        ends = (whole.low, whole.high) if whole.has_interval else (math.nan, math.nan)
        numbers = {"effect": whole.value, "low": ends[0], "high": ends[1], "n": whole.n}
        yield {
            **{"scope": scope, "factor": contrast.factor, "contrast": contrast.label, "where": contrast.where},
            **{"number": headline.title, "metric": headline.metric, **numbers, "pairs": len(common)},
            "unit": "base" if len({base for base, _ in common}) > 1 else "seed",
            "margin": headline.margin or math.nan,
            "word": comparison.state.of_pair,
            "correlation": comparison.correlation,
            "mixed_machines": mixed,
        }
