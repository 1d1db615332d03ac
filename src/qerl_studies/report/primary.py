"""The page of a study's primary contrasts: what each look shows, and before the first of them no arm's number.

Units are bases, those that a look sees (design/looks.py). Until the first look the page shows progress alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qerl_core.statistics import Estimate, holm
from qerl_studies.claims.measures import NOISY_ENTROPY
from qerl_studies.claims.preconditions import LEVEL
from qerl_studies.design.gates import blocked, gates, override
from qerl_studies.design.looks import counted, looks_reached
from qerl_studies.design.primary import MEASURES, Primary
from qerl_studies.design.sessions import Sessions
from qerl_studies.effects.estimate import over_units
from qerl_studies.effects.pairs import mean_of_runs, of_units
from qerl_studies.effects.state import State, of_look
from qerl_studies.runs.load import Run
from qerl_studies.tables.markdown import markdown_table

POWER = 0.8


@dataclass(frozen=True)
class Looked:
    """A contrast at a look: over bases, and with questions as draws too. `p` is adjusted for the other contrasts."""

    name: str
    over_bases: Estimate
    over_questions: Estimate
    p: float
    state: State
    failed: tuple[str, ...]  # gates that keep it from being tested by the rules of today

    @property
    def verdict(self) -> str:
        return self.state.of_contrast

    @property
    def exploratory(self) -> str:
        """What the rules of today say otherwise than the protocol, which did not ask these gates."""
        untested = State(untested="not testable here").word
        return f"exploratory, by the gates of today: {untested}, {'; '.join(self.failed)}" if self.failed else ""


def differences(study: Sessions, primary: Primary, contrast: str, bases: Sequence[int]) -> np.ndarray:
    """Treated minus control, a mean over seeds: (questions, bases). Raises ConfigError for different questions."""
    arms = [_cells(study, arm, bases) for arm in primary.contrasts[contrast]]
    return of_units(arms, MEASURES[primary.measure].metric).to_numpy()


def _cells(study: Sessions, arm: str, bases: Sequence[int]) -> dict[tuple[int, int], Run]:
    return {(base, seed): study.runs[arm, base, seed] for base in bases for seed in study.design.seeds}


def look(study: Sessions, primary: Primary, count: int) -> list[Looked]:
    """What the first `count` bases show. Student's t over bases, Holm's method over contrasts."""
    bases = counted(study, primary).bases[:count]
    tables = {name: differences(study, primary, name, bases) for name in primary.contrasts}
    estimates = {name: over_units(table, "fixed") for name, table in tables.items()}
    adjusted = holm([estimate.p_outside(0.0) for estimate in estimates.values()])
    last = count == max(primary.looks)
    failed = failed_gates(study, primary.contrasts, bases)
    return [
        Looked(
            name,
            estimates[name],
            over_units(tables[name], "drawn"),
            p,
            of_look(estimates[name], p, primary.looks[count], primary.margin if last else None),
            failed[name],
        )
        for name, p in zip(estimates, adjusted.tolist(), strict=True)
    ]


def failed_gates(
    study: Sessions, contrasts: Mapping[str, tuple[str, str]], bases: Sequence[int]
) -> dict[str, tuple[str, ...]]:
    """For each contrast those that stop one of its arms, as these bases have them, and `acts`: noise that the first arm
    alone has must raise the entropy of its sampler. Gates that the study overrode stop nothing.
    """
    runs = {cell: run for cell, run in study.runs.items() if cell[1] in bases}
    results = gates(study.design, [study.probes[base] for base in bases], runs)
    stopped = blocked(override(results, study.overridden))
    noises = {arm.name: study.design.option(arm, "aqn")["name"] for arm in study.design.arms}
    failed = {
        name: tuple(dict.fromkeys(gate for arm in pair for gate in stopped.get(arm, ())))
        for name, pair in contrasts.items()
    }
    for name, pair in contrasts.items():
        if noises[pair[0]] != noises[pair[1]] == "none":
            arms = [_cells(study, arm, bases) for arm in pair]
            found = over_units(of_units(arms, NOISY_ENTROPY.averaged).to_numpy(), "fixed")
            if not found.p_above(0.0) <= LEVEL:
                failed[name] += (f"acts ({NOISY_ENTROPY.name} {NOISY_ENTROPY.estimate_text(found)})",)
    return failed


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
            "95 %, questions fixed",
            "95 %, questions drawn",
            f"{100 * (1 - level):g} %, questions fixed",
        ]
        heads += ["p (Holm)", "found with 80 %", "verdict", "in one vocabulary"]
        lines = [
            [
                f"{one.name}: {' - '.join(primary.contrasts[one.name])}",
                measure.text(one.over_bases.value),
                *(measure.interval_text(found.low, found.high) for found in (one.over_bases, one.over_questions)),
                measure.interval_text(*one.over_bases.ends(level)),
                f"{one.p:.3f}",
                measure.size_text(one.over_bases.detectable(level / 2, POWER)),
                one.verdict,
                "; ".join(filter(None, (one.state.word, one.exploratory))),
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
    return mean_of_runs(_cells(study, arm, bases), MEASURES[primary.measure].metric)
