"""From effects to verdicts: one primary contrast per claim, and words that more data may add to but never withdraw.

A claim of more or less is *supported* if the effect is above zero in the direction claimed, *reversed* if it is above
zero in the other one, and *negligible* if the whole interval lies within the margin: words about direction and about
size, of which both may hold. A claim that something matters little is supported within the margin and reversed outside
of it. Each word says where the true effect lies, and as a study grows a word that is true of it is only ever joined by
another one. A claim is *not testable here* if a gate failed, *incomplete* if runs are missing, *undecided* otherwise.

A claim with several contrasts ("all formats") is supported, or negligible, by all of them, which needs no correction,
and reversed by any, which is corrected by Bonferroni. Holm's method then runs over the claims of one model and task:
once over directions (supported and reversed together, two-sided at 5 %) and once over smallness (2.5 %).

Only the primary setting votes, which the claim names before the data. All other settings are checks of robustness, and
contrasts of the paper's own recipes, which differ in more than the claim is about, are shown beside them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

import numpy as np

from qerl_bench.checks import require
from qerl_bench.claims.estimate import Setting, holds, settings
from qerl_bench.claims.gates import Gate
from qerl_bench.claims.match import Contrast, Stratum, Where, confounders, match
from qerl_bench.claims.measure import Measure
from qerl_bench.statistics import Mean, holm, interval
from qerl_bench.study.load import Run

DIRECTION = 0.05  # level of the two-sided tests of direction, over all claims of a scope
SMALLNESS = 0.025  # level of the tests that an effect lies within its margin: an interval of 95 %
NO_RUNS = "no runs"
Verdict = Literal[
    "supported",
    "supported but negligible",
    "reversed",
    "reversed but negligible",
    "negligible",
    "undecided",
    "not testable here",
    "incomplete",
]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One statement of the paper, and how runs can speak for or against it."""

    title: str
    statement: str
    paper: str  # the paper's own numbers, in a few words
    paper_effects: tuple[float, ...]  # the same in units of the measure, for figures; empty where it has no number
    source: str  # where they stand, and what there is to say about them
    expected: Literal["more", "less", "same"]
    measure: Measure
    margin: float  # smallest effect that matters, in units of the measure; a logarithm for ratios
    where: tuple[Where, ...]  # which runs can speak at all
    primary: tuple[Where, ...]  # the one setting of them that votes
    contrasts: tuple[Contrast, ...]
    gates: tuple[Gate, ...]
    command: str  # makes the runs, of the built-in world unless the claim is about a GPU
    at_scale: str  # makes the runs, on the models of the paper, that its own designs lack for a matched contrast
    beside: tuple[tuple[str, Callable[[Run, Run], float]], ...] = ()  # numbers of pairs, shown without a verdict

    def __post_init__(self) -> None:
        require(
            bool(self.primary) and any(contrast.votes for contrast in self.contrasts),
            f"the claim {self.title!r} names no primary contrast: give it a contrast that votes, and in `primary` the "
            "conditions of its one setting, before there are data",
        )


@dataclass(frozen=True)
class Result:
    """What the runs say about one contrast. `primary` is the setting that votes, if there is just one."""

    contrast: Contrast
    status: Verdict | None  # not testable here or incomplete, for `reason`; None if it can be tested
    reason: str
    primary: Setting | None = None
    others: tuple[Setting, ...] = ()
    beside: tuple[tuple[str, Mean], ...] = ()

    @property
    def settings(self) -> list[Setting]:
        return [*([self.primary] if self.primary else []), *self.others]

    @property
    def confounders(self) -> list[str]:
        """What the arms differ in besides what the claim is about, with values; empty for matched ones."""
        return confounders(self.contrast, [setting.stratum for setting in self.settings])


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim. p-values are adjusted; NaN where no test was made."""

    claim: Claim
    results: tuple[Result, ...]
    verdict: Verdict
    reason: str
    p_direction: float = math.nan
    p_within: float = math.nan
    detectable: float = math.nan  # smallest effect found with a power of 80 %, at the level that Holm may demand
    needed: int | None = None  # units, bases or seeds, with which an effect of one margin would be found so

    @property
    def voting(self) -> list[Result]:
        return [result for result in self.results if result.contrast.votes]


def judge(claims: Sequence[Claim], runs: Sequence[Run]) -> list[Judgement]:
    """The verdict on each claim from the finished ones of `runs`. Raises ConfigError, naming runs that lack a number."""
    finished = [run for run in runs if run.finished]
    found = [(claim, tuple(_result(claim, contrast, finished) for contrast in claim.contrasts)) for claim in claims]
    p = np.array([_p_values(*pair) for pair in found]).reshape(len(found), 3)  # for, reversed, within
    directed = np.where(np.isnan(p[:, :2]).all(1), np.nan, np.fmin(2 * np.fmin(p[:, 0], p[:, 1]), 1.0))
    direction, within = holm(directed), holm(p[:, 2])
    family = int((~np.isnan(directed)).sum())
    return [
        _decide(claim, results, p[i, 0] <= p[i, 1] or math.isnan(p[i, 1]), direction[i], within[i], family)
        for i, (claim, results) in enumerate(found)
    ]


def _result(claim: Claim, contrast: Contrast, runs: list[Run]) -> Result:
    able = [run for run in runs if not claim.measure.gpu or run.environment.get("device") == "cuda"]
    found = settings(claim.measure, contrast, claim.where, able)
    if not found:
        status, reason = _silence(claim, contrast, runs, able)
        return Result(contrast, status, reason)
    if not contrast.votes:
        return Result(contrast, None, "", None, tuple(found))
    primary = [one for one in found if all(holds(condition, one.stratum) for condition in claim.primary)]
    others = tuple(one for one in found if one not in primary)
    if not primary:
        return Result(contrast, "incomplete", "no runs in the primary setting", None, others)
    if len(primary) > 1:
        reason = f"{len(primary)} settings fit the primary contrast ({'; '.join(one.label for one in primary)}): name "
        return Result(contrast, "incomplete", reason + "one of them with --where KEY=VALUE", None, tuple(found))
    (one,) = primary
    if one.effect is None:
        torn = bool(one.stratum.blocks) and not one.reason.startswith("incomplete")
        return Result(contrast, "not testable here" if torn else "incomplete", one.reason, one, others)
    beside = tuple((name, _beside(contrast, one.stratum, of)) for name, of in claim.beside)
    failed = _no_test(claim, one.effect.whole) or next((why for gate in claim.gates if (why := gate(one, able))), "")
    return Result(contrast, "not testable here" if failed else None, failed, one, others, beside)


def _no_test(claim: Claim, effect: Mean) -> str:
    if effect.n < 2:
        return "a single seed decides nothing"
    if effect.identical and not claim.measure.exact:
        return "no spread over seeds: copies of a run, or a number that no seed moves?"
    return ""


def _beside(contrast: Contrast, stratum: Stratum, of: Callable[[Run, Run], float]) -> Mean:
    """A number of each pair of the first and the second arm: its mean over bases, or over seeds of a single base."""
    treated, control = (next(i for i, arm in enumerate(contrast.arms) if arm.sign == sign) for sign in (1, -1))
    by_base: dict[str, list[float]] = {}
    for cell in stratum.cells:
        by_base.setdefault(cell[0], []).append(of(stratum.arms[treated][cell], stratum.arms[control][cell]))
    (first, *more) = by_base.values()
    return interval([fmean(values) for values in by_base.values()] if more else first)


def _silence(claim: Claim, contrast: Contrast, runs: list[Run], able: list[Run]) -> tuple[Verdict, str]:
    """Why nothing is compared: no runs, or matched ones that one condition of the claim keeps out."""
    tries = [("they ran on a CPU and cannot speak for a GPU", claim.where, runs if len(able) < len(runs) else [])]
    tries += [
        (condition.otherwise, tuple(other for other in claim.where if other is not condition), able)
        for condition in claim.where
        if condition.otherwise
    ]
    for excuse, where, chosen in tries:
        kept_out = {run.path for stratum in match(contrast, where, chosen) for run in stratum.runs}
        if kept_out:
            return "not testable here", f"{len(kept_out)} matched runs, but {excuse}"
    return "incomplete", NO_RUNS


def _tested(results: Sequence[Result]) -> list[Mean]:
    """The effects of the contrasts that vote and can be tested; one that is known exactly has next to no error."""
    found = [result.primary for result in results if result.contrast.votes and not result.status]
    effects = [setting.effect.whole for setting in found if setting and setting.effect]
    return [replace(effect, error=sys.float_info.min) if effect.identical else effect for effect in effects]


def _p_values(claim: Claim, results: Sequence[Result]) -> tuple[float, float, float]:
    """One-sided p-values for the claim, for its opposite, and for an effect within the margin; NaN where untested.

    What all contrasts must show needs each of them; the opposite needs one, whichever.
    """
    votes = sum(result.contrast.votes for result in results)
    effects = _tested(results)
    if not effects:
        return math.nan, math.nan, math.nan
    within = [effect.p_within(claim.margin) for effect in effects]
    if claim.expected == "same":
        of, against = within, [effect.p_outside(claim.margin) for effect in effects]
    else:
        sides = [(effect.p_above(0.0), effect.p_below(0.0)) for effect in effects]
        of, against = (list(side) for side in zip(*sides, strict=True))
        if claim.expected == "less":
            of, against = against, of
    reversed_ = min(1.0, votes * min(against))
    if len(effects) < votes:  # not all of them can be tested, so nothing can be said of all of them
        return math.nan, reversed_, math.nan
    return max(of), reversed_, math.nan if claim.expected == "same" else max(within)


def _decide(
    claim: Claim, results: tuple[Result, ...], forward: bool, direction: float, within: float, family: int
) -> Judgement:
    tested, level = _tested(results), DIRECTION / 2 / max(family, 1)
    sized = tested if claim.expected != "same" else []  # what is tested against 0
    detectable = max((effect.detectable(level) for effect in sized), default=math.nan)
    counts = [effect.needed(claim.margin, level) for effect in sized]
    enough = [count for count in counts if count is not None]
    needed = max(enough) if enough and len(enough) == len(counts) else None
    verdict: Verdict = "undecided"
    reason = ""
    failed = [result for result in results if result.contrast.votes and result.status]
    small = within <= SMALLNESS
    if direction <= DIRECTION and forward:
        verdict = "supported but negligible" if small else "supported"
    elif direction <= DIRECTION:
        verdict = "reversed but negligible" if small else "reversed"
    elif small:
        verdict = "negligible"
    elif failed:
        statuses = {result.status for result in failed}
        verdict = "not testable here" if "not testable here" in statuses else "incomplete"
        reason = "; ".join(dict.fromkeys(result.reason for result in failed if result.status == verdict))
    elif math.isnan(direction):
        verdict, reason = "incomplete", NO_RUNS
    needs = all if verdict == "supported" else any
    beyond = needs(min(e.p_above(claim.margin), e.p_below(-claim.margin)) <= SMALLNESS for e in tested)
    if verdict in ("supported", "reversed") and claim.expected != "same" and not beyond:
        reason = "whether by as much as the margin is open"
    return Judgement(claim, results, verdict, reason, float(direction), float(within), detectable, needed)
