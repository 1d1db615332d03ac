"""The table by base: what each could do before any training, and the effect of each arm on its accuracy after it.

Intervals of effects have questions drawn, as claims have them; those of what was asked before training have them fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from qerl_core.statistics import Estimate
from qerl_studies.design.design import Arm
from qerl_studies.design.readings import by_base, pass_at
from qerl_studies.design.sessions import Sessions
from qerl_studies.effects.estimate import over_known
from qerl_studies.effects.pairs import shared
from qerl_studies.figures.paired import GREEDY, SAMPLED, effect
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import held_out
from qerl_studies.tables.markdown import markdown_table

WAYS = {"sampled": SAMPLED, "greedy": GREEDY}


@dataclass(frozen=True)
class Column:
    """Numbers by base, NaN for what was not run or not asked on one, how they are shown, and their mean."""

    head: str
    values: pd.Series
    form: str
    estimate: Estimate
    correlation: float = math.nan  # of two arms

    def cell(self, value: float) -> str:
        return "-" if math.isnan(value) else format(value, self.form)

    def mean(self, bases: Sequence[int]) -> float:
        known = self.values[[*bases]].dropna()
        return float(known.mean()) if len(known) else math.nan

    @property
    def interval(self) -> str:
        scale = 1 if self.form == ".3f" else 100
        return self.estimate.interval_text(lambda end: self.cell(scale * end))


def bases(study: Sessions, controls: Mapping[str, Arm]) -> str:
    """The table in Markdown; `controls` has what each arm is compared with."""
    columns = [*_before(study), *(one for arm, control in controls.items() for one in _after(study, arm, control.name))]
    session_of = study.session_of
    sessions: dict[str, list[int]] = {}
    for base in study.probes:
        sessions.setdefault(session_of[base], []).append(base)
    rows = [[str(base), session_of[base], *(one.cell(one.values[base]) for one in columns)] for base in study.probes]
    several = {name: group for name, group in sessions.items() if len(group) > 1}
    rows += [["mean", name, *(one.cell(one.mean(group)) for one in columns)] for name, group in several.items()]
    rows.append(["mean", "", *(one.cell(one.mean([*study.probes])) for one in columns)])
    rows.append(["95 %, questions drawn after training", "", *(one.interval for one in columns)])
    together = [f"{one.correlation:+.2f}" if math.isfinite(one.correlation) else "-" for one in columns]
    rows.append(["correlation of the arms", "", *together])
    note = (
        f"Per cent and points of accuracy. Left: {study.design.probe.questions} training questions before any training,"
        " which intervals take as they are; damage is what a format costs. Right: held-out questions after the last"
        " step, right in the form that the task asks for, one sample at the temperature of the"
        " evaluation, and beside it greedy answers; the mean of seeds.\n"
    )
    return f"{markdown_table(['base', 'session', *(one.head for one in columns)], rows)}\n\n{note}"


def _before(study: Sessions) -> list[Column]:
    """Of the probes: what a base can do, what formats cost it, and what the noise of each dosed arm does."""
    (reference, *formats), samples = study.formats, study.design.probe.samples
    numbers: dict[str, Callable[[Mapping], float]] = {
        "pass@1": lambda one: pass_at(one, reference, 1),
        f"pass@{samples}": lambda one: pass_at(one, reference, samples),
    }
    for quant in formats:
        numbers[f"damage {quant}"] = lambda one, quant=quant: pass_at(one, reference, 1) - pass_at(one, quant, 1)
    found = [_of_probes(head, study, number, ".1f", 100) for head, number in numbers.items()]
    dosed = [arm.name for arm in study.arms if arm.dosed]
    return found + [
        _of_probes(f"KL {name}", study, lambda one, name=name: one["doses"].get(name, {}).get("kl", math.nan), ".3f", 1)
        for name in dosed
    ]


def _of_probes(head: str, study: Sessions, number: Callable[[Mapping], float], form: str, scale: float) -> Column:
    values = pd.Series({base: number(probe) for base, probe in study.probes.items()}, dtype=float)
    return Column(head, scale * values, form, over_known(values))


def _after(study: Sessions, arm: str, control: str) -> list[Column]:
    """The difference of an arm to its control, sampled and greedy."""
    return [_difference(study, arm, control, way, way if way != "sampled" else f"{arm} - {control}") for way in WAYS]


def _difference(study: Sessions, arm: str, control: str, way: str, head: str) -> Column:
    ends = [by_base(study.runs, name, end_of(way)) for name in (arm, control)]
    values = shared(*ends).reindex([*study.probes])
    if not values.notna().any():
        return Column(head, values, "+.1f", over_known(values))
    found = effect(*study.pairs(arm, control), WAYS[way])
    return Column(head, 100 * values, "+.1f", found.whole, found.correlation)


def end_of(way: str) -> Callable[[Run], float]:
    """Held-out accuracy after training, sampled or greedy; NaN for a run that was not asked so."""

    def of_run(run: Run) -> float:
        if run.series("eval", f"eval/accuracy_{way}").empty:
            return math.nan
        return float(np.mean(np.asarray(held_out(way)(run))))

    return of_run
