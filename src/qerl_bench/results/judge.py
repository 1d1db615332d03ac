"""From matched runs to verdicts: effect sizes with intervals, and tests that answer for being many.

A claim that something is larger is *supported* if its effect is above zero, and *contradicted* if its effect is below
the margin, the smallest one that would matter: a reversed effect and one too small to care about both speak against it.
A claim that something does not matter is supported if the effect is within the margin, contradicted if it is outside.
Both are one-sided tests at 2.5 %, adjusted by Holm's method over every contrast, once for all that is called supported
and once for all that is called contradicted: among the matched contrasts of one model and task the chance of any false
verdict is at most 5 %. Everything else is *undecided*, and so is every number of a single seed, or of seeds that all
gave the same.

Settings whose arms gave the same numbers, seed by seed, are one measurement made several times, and count once: neither
the rank of an adapter nor the learning rate moves the policy before its first update.

The verdict on a claim is that on its matched contrasts. Where the paper compared recipes that differ in more than the
claim is about, these recipes are contrasted too, judged in a family of their own, and decide nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import pandas as pd

from qerl_bench.errors import BadInput, require
from qerl_bench.results.load import Run
from qerl_bench.results.match import Contrast, Stratum, Where, confounders, labels, match, missing
from qerl_bench.results.measure import Measure
from qerl_bench.results.stats import Mean, crossed, holm, interval

LEVEL = 0.025  # of each one-sided family of tests
NO_RUNS = "no runs"
Verdict = Literal["supported", "contradicted", "undecided"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One statement of the paper, and how runs can speak for or against it."""

    title: str
    statement: str
    paper: str  # the paper's own numbers, in a few words
    source: str  # where they stand, and what there is to say about them
    expected: Literal["more", "less", "same"]
    measure: Measure
    margin: float  # smallest effect that matters, in units of the measure; a logarithm for ratios
    where: tuple[Where, ...]
    contrasts: tuple[Contrast, ...]
    command: str  # makes the runs, of the built-in world unless the claim is about a GPU
    at_scale: str  # makes the runs, on the models of the paper, that its own designs lack for a matched contrast
    beside: tuple[
        tuple[str, Callable[[Run, Run], float]], ...
    ] = ()  # numbers of pairs that are shown without a verdict


@dataclass(frozen=True)
class Result:
    """What the runs say about one contrast. `effect` is None where there is nothing to judge; `reason` says why."""

    contrast: Contrast
    reason: str
    strata: tuple[Stratum, ...] = ()
    labels: tuple[str, ...] = ()
    effect: Mean | None = None
    questions: int = 1  # that the effect was averaged over; 1 for a number of the whole run
    parts: tuple[Mean, ...] = ()  # the effect in each stratum
    levels: tuple[tuple[float, ...], ...] = ()  # in each stratum the mean of each arm, over seeds and questions
    beside: tuple[tuple[str, Mean], ...] = ()
    p_for: float = float("nan")  # adjusted
    p_against: float = float("nan")
    verdict: Verdict = "undecided"

    @property
    def confounders(self) -> list[str]:
        """What the arms differ in besides what the claim is about, with values; empty for matched ones."""
        return confounders(self.contrast, self.strata)


@dataclass(frozen=True)
class Judgement:
    claim: Claim
    results: tuple[Result, ...]

    @property
    def verdict(self) -> Verdict:
        """Contradicted if one matched contrast contradicts it, supported if all of them support it."""
        verdicts = {result.verdict for result in self.results if not result.contrast.confounded}
        return (
            "contradicted" if "contradicted" in verdicts else "supported" if verdicts == {"supported"} else "undecided"
        )


def judge(claims: Sequence[Claim], runs: Sequence[Run]) -> list[Judgement]:
    """The verdict on each claim from the finished ones of `runs`. Raises BadInput, naming runs that lack a number."""
    finished = [run for run in runs if run.finished]
    found = [(claim, _estimate(claim, contrast, finished)) for claim in claims for contrast in claim.contrasts]
    p_values = np.array([_tests(claim, result.effect) for claim, result in found])  # (contrasts, for and against)
    recipes = np.array([bool(result.contrast.confounded) for _, result in found])
    for family in (recipes, ~recipes):
        p_values[family] = np.stack([holm(column) for column in p_values[family].T], axis=1)
    decided = iter([_decide(*pair, *both) for pair, both in zip(found, p_values.tolist(), strict=True)])
    return [Judgement(claim, tuple(next(decided) for _ in claim.contrasts)) for claim in claims]


def _estimate(claim: Claim, contrast: Contrast, runs: list[Run]) -> Result:
    able = [run for run in runs if not claim.measure.gpu or run.environment.get("device") == "cuda"]
    strata = match(contrast, claim.where, able)
    if not strata:
        return Result(contrast, _silence(claim, contrast, runs, able))
    if lacking := missing(contrast, strata):
        return Result(contrast, f"incomplete grid, not compared; missing: {'; '.join(lacking)}")
    seeds = sorted(strata[0].arms[0])
    values = _measured(claim.measure, strata)
    strata, named = _distinct(strata, values)
    tables = [_differences(contrast, stratum, seeds, values) for stratum in strata]
    questions = {tuple(table.index) for table in tables}
    require(len(questions) == 1, f"{claim.title}: these runs were asked different questions: {_names(strata)}")
    parts = tuple(_mean(table.to_numpy()) for table in tables)
    treated, control = (next(i for i, arm in enumerate(contrast.arms) if arm.sign == sign) for sign in (1, -1))
    beside = tuple(
        (
            name,
            interval([fmean(of(s.arms[treated][seed], s.arms[control][seed]) for s in strata) for seed in seeds]),
        )
        for name, of in claim.beside
    )
    whole = _mean(np.mean([table.to_numpy() for table in tables], axis=0))
    levels = tuple(
        tuple(fmean(values[run.path].mean() for run in runs.values()) for runs in stratum.arms) for stratum in strata
    )
    return Result(contrast, "", tuple(strata), named, whole, len(tables[0]), parts, levels, beside)


def _distinct(strata: Sequence[Stratum], values: dict[Path, pd.Series]) -> tuple[list[Stratum], tuple[str, ...]]:
    """The first of all settings that have the same numbers in every arm, by seed and question, and what to call it."""
    found: dict[Any, list[tuple[Stratum, str]]] = {}
    for stratum, label in zip(strata, labels(strata), strict=True):
        arms = tuple(tuple((seed, *values[arm[seed].path].items()) for seed in sorted(arm)) for arm in stratum.arms)
        found.setdefault(arms, []).append((stratum, label))
    chosen = [group[0][0] for group in found.values()]
    more = [f" and {len(group) - 1} more with the same numbers" if len(group) > 1 else "" for group in found.values()]
    return chosen, tuple(group[0][1] + rest for group, rest in zip(found.values(), more, strict=True))


def _silence(claim: Claim, contrast: Contrast, runs: list[Run], able: list[Run]) -> str:
    """Why nothing is compared: no runs, or matched ones that one condition of the claim keeps out."""
    tries = [("on a CPU: they cannot speak for a GPU", claim.where, runs if len(able) < len(runs) else [])]
    tries += [
        (condition.otherwise, tuple(other for other in claim.where if other is not condition), able)
        for condition in claim.where
        if condition.otherwise
    ]
    for excuse, where, chosen in tries:
        kept_out = {run.path for s in match(contrast, where, chosen) for arm in s.arms for run in arm.values()}
        if kept_out:
            return f"{len(kept_out)} matched runs, but {excuse}"
    return NO_RUNS


def _differences(contrast: Contrast, stratum: Stratum, seeds: list[int], values: dict[Path, pd.Series]) -> pd.DataFrame:
    """The contrast within each seed: (questions, seeds), or (1, seeds) where a run has one number."""
    columns = {
        seed: sum(arm.sign * values[runs[seed].path] for arm, runs in zip(contrast.arms, stratum.arms, strict=True))
        for seed in seeds
    }
    table = pd.DataFrame(columns)
    require(bool(table.notna().all(axis=None)), f"these runs were asked different questions: {_names([stratum])}")
    return table


def _mean(table: np.ndarray) -> Mean:
    return crossed(table) if len(table) > 1 else interval(table[0])


def _tests(claim: Claim, effect: Mean | None) -> tuple[float, float]:
    """p-values for the claim and against it; NaN where a single seed, several that are alike, or nothing speaks.

    Alike is as it should be for an exact number, whose p-values are 0 and 1.
    """
    if effect is None or effect.n < 2:
        return float("nan"), float("nan")
    if effect.identical and claim.measure.exact:
        effect = replace(effect, error=sys.float_info.min)
    if claim.expected == "same":
        return effect.p_within(claim.margin), effect.p_outside(claim.margin)
    if claim.expected == "more":
        return effect.p_above(0.0), effect.p_below(claim.margin)
    return effect.p_below(0.0), effect.p_above(-claim.margin)


def _decide(claim: Claim, result: Result, p_for: float, p_against: float) -> Result:
    if result.effect is None:
        return result
    small = p_against <= LEVEL and claim.expected != "same"
    if result.effect.n < 2:
        verdict, reason = "undecided", "a single seed decides nothing"
    elif result.effect.identical and not claim.measure.exact:
        verdict, reason = "undecided", "no spread over seeds: copies of a run, or a number that no seed moves?"
    elif p_for <= LEVEL:
        verdict, reason = "supported", "there, but smaller than what would matter" if small else ""
    elif p_against <= LEVEL:
        reversed_ = claim.expected != "same" and (result.effect.mean < 0) == (claim.expected == "more")
        clear = reversed_ and result.effect.excludes_zero
        verdict, reason = "contradicted", "the reverse" if clear else "no effect that would matter" if small else ""
    elif min(alone := _tests(claim, result.effect)) <= LEVEL:
        which = "supported" if alone[0] <= LEVEL else "contradicted"
        verdict, reason = "undecided", f"{which} if it were the only contrast, not after Holm's correction"
    else:
        verdict, reason = "undecided", "too few seeds for this spread"
    return replace(result, p_for=p_for, p_against=p_against, verdict=verdict, reason=reason)


def _measured(measure: Measure, strata: Sequence[Stratum]) -> dict[Path, pd.Series]:
    """The number of each run, or its numbers by question. One message for all runs that lack them."""
    values: dict[Path, pd.Series] = {}
    complaints: list[str] = []
    for run in (run for stratum in strata for arm in stratum.arms for run in arm.values()):
        if run.path not in values:
            try:
                found = pd.Series(measure.of(run))
            except BadInput as error:
                complaints.append(str(error))
                found = pd.Series([np.nan])
            values[run.path] = found.map(math.log) if measure.ratio else found
    require(
        not complaints,
        f"{measure.name} cannot be measured in {len(complaints)} of these runs: {'; '.join(complaints[:5])}. "
        "Leave them out, or run them again",
    )
    return values


def _names(strata: Sequence[Stratum]) -> str:
    return ", ".join(sorted({run.name for stratum in strata for arm in stratum.arms for run in arm.values()}))
