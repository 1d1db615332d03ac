"""The rule of a study's primary contrasts: what each look shows, and what studies of one protocol show together.

Units are bases, those that a look sees (design/looks.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qerl_core.statistics import Estimate, holm
from qerl_studies.claims.measures import NOISY_ENTROPY
from qerl_studies.claims.preconditions import LEVEL
from qerl_studies.design.design import read_design
from qerl_studies.design.gates import blocked, gates
from qerl_studies.design.looks import counted, looks_reached
from qerl_studies.design.primary import MEASURES, Primary
from qerl_studies.design.protocol import protocol_of
from qerl_studies.design.sessions import Sessions, read_study
from qerl_studies.effects.estimate import Effect, effect_of, least_squares
from qerl_studies.effects.state import State, of_all, of_look
from qerl_studies.runs.load import Run


@dataclass(frozen=True)
class Looked:
    """A contrast at a look. `p` is adjusted for the other contrasts."""

    name: str
    effect: Effect
    p: float
    state: State
    failed: tuple[str, ...]  # gates that keep it from being tested by the rules of today
    by_runs: Estimate  # least squares without pairs, an effect for each session
    p_by_runs: float
    state_by_runs: State

    @property
    def over_bases(self) -> Estimate:
        """What the protocol asks for, whose questions are fixed."""
        return self.effect.fixed

    @property
    def verdict(self) -> str:
        return self.state.of_contrast

    @property
    def exploratory(self) -> str:
        """What the rules of today say otherwise than the protocol, which did not ask these gates."""
        untested = State(untested="not testable here").word
        return f"exploratory, by the gates of today: {untested}, {'; '.join(self.failed)}" if self.failed else ""


def effect_on(study: Sessions, primary: Primary, contrast: str, bases: Sequence[int]) -> Effect:
    """Treated minus control on these bases. Raises ConfigError for different questions."""
    return effect_of(_arms(study, primary.contrasts[contrast], bases), MEASURES[primary.measure].metric)


def _arms(study: Sessions, names: Sequence[str], bases: Sequence[int]) -> list[dict[tuple[int, int], Run]]:
    cells = [(base, seed) for base in bases for seed in study.design.seeds]
    return [{cell: study.runs[name, *cell] for cell in cells} for name in names]


def look(study: Sessions, primary: Primary, count: int) -> list[Looked]:
    """What the first `count` bases show. Student's t over bases, Holm's method over contrasts."""
    bases = counted(study, primary).bases[:count]
    effects = {name: effect_on(study, primary, name, bases) for name in primary.contrasts}
    by_runs = {name: least_squares(*one.by_arm, place=study.session_of) for name, one in effects.items()}
    p, p_by_runs = (
        holm([one.p_outside(0.0) for one in found])
        for found in ([one.fixed for one in effects.values()], by_runs.values())
    )
    level, margin = primary.looks[count], primary.margin if count == max(primary.looks) else None
    failed = failed_gates(study, primary.contrasts, bases)
    return [
        Looked(
            name,
            effect,
            float(p[place]),
            of_look(effect.fixed, p[place], level, margin),
            failed[name],
            by_runs[name],
            float(p_by_runs[place]),
            of_look(by_runs[name], p_by_runs[place], level, margin),
        )
        for place, (name, effect) in enumerate(effects.items())
    ]


def failed_gates(
    study: Sessions, contrasts: Mapping[str, tuple[str, str]], bases: Sequence[int]
) -> dict[str, tuple[str, ...]]:
    """For each contrast those that stop one of its arms, as these bases have them, and `acts`: noise that the first arm
    alone has must raise the entropy of its sampler. One that the study overrode let its runs begin, and decides here.
    """
    runs = {cell: run for cell, run in study.runs.items() if cell[1] in bases}
    results = gates(study.design, [study.probes[base] for base in bases], runs)
    stopped = blocked(results)
    noises = {arm.name: study.design.option(arm, "aqn")["name"] for arm in study.design.arms}
    failed = {
        name: tuple(dict.fromkeys(gate for arm in pair for gate in stopped.get(arm, ())))
        for name, pair in contrasts.items()
    }
    for name, pair in contrasts.items():
        if noises[pair[0]] != noises[pair[1]] == "none":
            found = effect_of(_arms(study, pair, bases), NOISY_ENTROPY.averaged).fixed
            if not found.p_above(0.0) <= LEVEL:
                failed[name] += (f"acts ({NOISY_ENTROPY.name} {NOISY_ENTROPY.estimate_text(found)})",)
    return failed


@dataclass(frozen=True)
class Together:
    """One contrast in all studies of a protocol: `each` by study, None where there was no look or are no runs."""

    name: str
    each: Mapping[str, Looked | None]

    @property
    def p(self) -> float:
        """The largest, which is that of the word; NaN unless all were tested."""
        return float(np.max([np.nan if one is None else one.p for one in self.each.values()]))

    @property
    def state(self) -> State:
        return of_all([State(untested="no look") if one is None else one.state for one in self.each.values()])

    @property
    def by_gates_of_today(self) -> State:
        failed = any(one is None or one.failed for one in self.each.values())
        return State(untested="a gate failed") if failed else self.state


def together(study: Sessions) -> list[Together]:
    """The contrasts of all studies beside this one that have its `primary` and its protocol, at the last look of each.

    Empty for a study that is the only one.
    """
    primary, here = study.design.primary, study.design.path.parent
    assert primary is not None
    folders = sorted(file.parent for file in here.parent.glob("*/study.yaml"))
    folders = [folder for folder in folders if protocol_of(folder) == protocol_of(here) is not None]
    alike = [folder for folder in folders if read_design(folder / "study.yaml").primary == primary]
    found = {folder.name: last_look(study if folder == here else folder) for folder in alike}
    each = {name: {study: looked.get(name) for study, looked in found.items()} for name in primary.contrasts}
    return [Together(*one) for one in each.items()] if len(found) > 1 else []


def last_look(of: Sessions | Path) -> dict[str, Looked]:
    """The primary contrasts of a study at its last look, by name; none before the first look."""
    study = of if isinstance(of, Sessions) else read_study(of) if any(of.glob("data/*/settings.json*")) else None
    if study is None or study.design.primary is None or not (reached := looks_reached(study, study.design.primary)):
        return {}
    return {one.name: one for one in look(study, study.design.primary, reached[-1])}
