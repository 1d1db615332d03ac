"""The page of a study's primary contrasts: what each look shows, and before the first of them no arm's number.

Units are bases, those that a look sees (design/looks.py). Until the first look the page shows progress alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import pandas as pd

from qerl_core.checks import require
from qerl_core.statistics import Estimate, holm, mean_ci, mean_ci_crossed
from qerl_studies.design.looks import counted, looks_reached, runs_of
from qerl_studies.design.primary import MEASURES, Primary
from qerl_studies.design.sessions import Sessions
from qerl_studies.tables.markdown import markdown_table

POWER = 0.8


@dataclass(frozen=True)
class Looked:
    """A contrast at a look: over bases, and with questions as draws too. `p` is adjusted for the other contrasts."""

    name: str
    over_bases: Estimate
    over_questions: Estimate
    p: float
    verdict: str


def differences(study: Sessions, primary: Primary, contrast: str, bases: Sequence[int]) -> np.ndarray:
    """Treated minus control, a mean over seeds: (questions, bases). Raises ConfigError for different questions."""
    columns = []
    for base in bases:
        treated, control = (_mean(study, primary, arm, base) for arm in primary.contrasts[contrast])
        columns.append(treated - control)
    table = pd.DataFrame(columns).T
    require(bool(table.notna().all(axis=None)), f"the arms of {contrast} were asked different questions")
    return table.to_numpy()


def _mean(study: Sessions, primary: Primary, arm: str, base: int) -> pd.Series:
    """What an arm reached on a base, by question."""
    found = [pd.Series(MEASURES[primary.measure].metric(run)) for run in runs_of(study, arm, base)]
    return pd.concat(found, axis=1).mean(axis=1)


def look(study: Sessions, primary: Primary, count: int) -> list[Looked]:
    """What the first `count` bases show. Student's t over bases, Holm's method over contrasts."""
    bases = counted(study, primary).bases[:count]
    tables = {name: differences(study, primary, name, bases) for name in primary.contrasts}
    estimates = {name: mean_ci(table.mean(axis=0)) for name, table in tables.items()}
    adjusted = holm([estimate.p_outside(0.0) for estimate in estimates.values()])
    last = count == max(primary.looks)
    return [
        Looked(
            name,
            estimates[name],
            mean_ci_crossed(tables[name]) if len(tables[name]) > 1 else estimates[name],
            p,
            _verdict(estimates[name], p, primary.looks[count], primary.margin if last else None),
        )
        for name, p in zip(estimates, adjusted.tolist(), strict=True)
    ]


def _verdict(estimate: Estimate, p: float, level: float, margin: float | None) -> str:
    """What is said of a contrast. Only the last look, which has a `margin` here, may say that it is negligible."""
    if p <= level:
        return "higher" if estimate.value > 0 else "lower"
    if margin is not None and -margin < estimate.low and estimate.high < margin:
        return "negligible"
    return "open"


def primary_page(study: Sessions) -> str:
    """Markdown: the looks that are reached, or how far the study is."""
    primary = study.design.primary
    assert primary is not None
    have, reached = counted(study, primary), looks_reached(study, primary)
    measure, codes = MEASURES[primary.measure], sorted({run.code for run in study.runs.values()})
    parts = [
        "# Primary contrasts",
        f"{measure.name[0].upper()}{measure.name[1:]}. {len(have.bases)} bases have all arms; looks at "
        f"{' and '.join(map(str, primary.looks))}. Code {', '.join(codes)}.",
    ]
    if have.left_out:
        parts.append("\n".join(f"- Base {base} does not count: {reason}." for base, reason in have.left_out.items()))
    if not reached:
        parts.append("Arms are compared at the first look.")
    for count in reached:
        level = primary.looks[count]
        heads = [
            "contrast",
            "difference",
            "95 %, over bases",
            "over questions too",
            f"{100 * (1 - level):g} %, over bases",
        ]
        heads += ["p (Holm)", "found with 80 %", ""]
        lines = [
            [
                f"{one.name}: {' - '.join(primary.contrasts[one.name])}",
                measure.text(one.over_bases.value),
                *(measure.interval_text(found.low, found.high) for found in (one.over_bases, one.over_questions)),
                measure.interval_text(*one.over_bases.ends(level)),
                f"{one.p:.3f}",
                measure.size_text(one.over_bases.detectable(level / 2, POWER)),
                one.verdict,
            ]
            for one in look(study, primary, count)
        ]
        parts += [
            f"## {count} bases, level {level:g}",
            markdown_table(heads, lines),
            f"Bases {', '.join(map(str, sorted(have.bases[:count])))}. {_levels(study, primary, have.bases[:count])}",
        ]
    return "\n\n".join(parts) + "\n"


def _levels(study: Sessions, primary: Primary, bases: Sequence[int]) -> str:
    measure = MEASURES[primary.measure]
    levels = {arm: level_of(study, primary, arm, bases) for arm in primary.arms}
    return f"Levels: {', '.join(f'{arm} {measure.level_text(level)}' for arm, level in levels.items())}."


def level_of(study: Sessions, primary: Primary, arm: str, bases: Sequence[int]) -> float:
    """The mean of an arm over bases."""
    return fmean(_mean(study, primary, arm, base).mean() for base in bases)
