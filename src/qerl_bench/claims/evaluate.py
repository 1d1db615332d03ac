"""From effects to verdicts: effect sizes with confidence intervals, and tests corrected for multiple comparisons.

A claim of "more" or "less" is *supported* if the effect has the direction claimed, *reversed* if it has the other one,
and *negligible* if the whole interval lies within the margin; a direction and a size can both hold. A claim of "same"
is supported within the margin and reversed outside of it. More data can add a word to a verdict, but not make one
false. A claim is *not testable here* if a gate failed, *incomplete* if runs are missing, and *undecided* otherwise.

A claim with several contrasts ("all formats") is supported, or negligible, if all of them show it, which needs no
correction; it is reversed if any shows the opposite, which is corrected by Bonferroni. Holm's method is then applied
over the claims of one model and task, once to the tests of direction (two-sided, 5 %) and once to the tests of
smallness (2.5 %).

Only the primary setting votes; the claim names it before there are data. Other settings are robustness checks.
Contrasts of the paper's own recipes, which differ in more than the claim is about, are reported without a vote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

import numpy as np

from qerl_bench.checks import require
from qerl_bench.claims.estimate import Comparison, compare
from qerl_bench.claims.gates import Gate
from qerl_bench.claims.match import Contrast, Filter, Stratum, confounders, match
from qerl_bench.claims.measure import Measure
from qerl_bench.claims.stopped import StoppedArm, stopped_arms, why_stopped
from qerl_bench.statistics import Estimate, holm, mean_ci
from qerl_bench.study.load import Run

DIRECTION = 0.05  # level of the two-sided tests of direction, over all claims of a model and task
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
    """One statement of the paper, and how runs can support or contradict it."""

    title: str
    statement: str
    paper: str  # the paper's own numbers, in a few words
    paper_effects: tuple[float, ...] = ()  # the same in units of the measure, for figures
    source: str  # where the paper says it, and under which conditions
    expected: Literal["more", "less", "same"]
    measure: Measure
    where: tuple[Filter, ...]  # which runs count at all
    primary: tuple[Filter, ...]  # the one setting of them that votes
    contrasts: tuple[Contrast, ...]
    gates: tuple[Gate, ...] = ()
    command: str  # makes the runs: with the built-in model and task, unless the claim is about a GPU
    at_scale: str  # makes the runs with the paper's models, including arms for a matched contrast that the paper lacks
    additional: tuple[tuple[str, Callable[[Run, Run], float]], ...] = ()  # numbers of pairs, shown without a verdict

    def __post_init__(self) -> None:
        require(
            bool(self.primary) and any(contrast.votes for contrast in self.contrasts),
            f"the claim {self.title!r} names no primary contrast: give it a contrast that votes, and in `primary` the "
            "conditions of its one setting, before there are data",
        )


@dataclass(frozen=True)
class ContrastResult:
    """What the runs say about one contrast. `primary` is the comparison that votes, if there is exactly one."""

    contrast: Contrast
    status: Verdict | None  # not testable here or incomplete, because of `reason`; None if it can be tested
    reason: str
    primary: Comparison | None = None
    others: tuple[Comparison, ...] = ()
    additional: tuple[tuple[str, Estimate], ...] = ()

    @property
    def comparisons(self) -> list[Comparison]:
        return [*([self.primary] if self.primary else []), *self.others]

    @property
    def confounders(self) -> list[str]:
        """What else the arms differ in, with values; empty for matched arms."""
        return confounders(self.contrast, [comparison.stratum for comparison in self.comparisons])


@dataclass(frozen=True)
class ClaimResult:
    """The verdict on a claim. p-values are adjusted; NaN if no test was made."""

    claim: Claim
    contrasts: tuple[ContrastResult, ...]
    verdict: Verdict
    reason: str
    p_direction: float = math.nan
    p_within: float = math.nan
    detectable: float = math.nan  # smallest effect found with a power of 80 %, at the strictest level of Holm's method
    needed: int | None = None  # units, bases or seeds, with which an effect of one margin would be found so

    @property
    def voting(self) -> list[ContrastResult]:
        return [result for result in self.contrasts if result.contrast.votes]


def evaluate_claims(claims: Sequence[Claim], runs: Sequence[Run]) -> list[ClaimResult]:
    """The verdict on each claim from the finished `runs`. Raises ConfigError, naming runs that lack a number."""
    finished = [run for run in runs if run.finished]
    stopped = stopped_arms(finished)
    tested = [(claim, tuple(_test(claim, one, finished, stopped) for one in claim.contrasts)) for claim in claims]
    p = np.array([_p_values(*pair) for pair in tested]).reshape(len(tested), 3)  # claimed, reversed, within
    two_sided = np.where(np.isnan(p[:, :2]).all(1), np.nan, np.fmin(2 * np.fmin(p[:, 0], p[:, 1]), 1.0))
    direction, within = holm(two_sided), holm(p[:, 2])
    level = DIRECTION / 2 / max(int((~np.isnan(two_sided)).sum()), 1)
    as_claimed = (p[:, 0] <= p[:, 1]) | np.isnan(p[:, 1])  # False if only the opposite could be tested
    return [
        _verdict(claim, results, bool(as_claimed[i]), direction[i], within[i], level)
        for i, (claim, results) in enumerate(tested)
    ]


def _test(claim: Claim, contrast: Contrast, runs: list[Run], stopped: Sequence[StoppedArm]) -> ContrastResult:
    eligible = [run for run in runs if claim.measure.counts(run)]
    comparisons = compare(claim.measure, contrast, claim.where, eligible)
    if not comparisons:
        return ContrastResult(contrast, *_why_no_comparison(claim, contrast, runs, eligible, stopped))
    if not contrast.votes:
        return ContrastResult(contrast, None, "", None, tuple(comparisons))
    primary = [comparison for comparison in comparisons if comparison.is_in(claim.primary)]
    others = tuple(comparison for comparison in comparisons if comparison not in primary)
    if not primary:
        return ContrastResult(contrast, "incomplete", "no runs in the primary setting", None, others)
    if len(primary) > 1:
        settings = "; ".join(comparison.label for comparison in primary)
        reason = (
            f"{len(primary)} settings fit the primary contrast ({settings}): name one of them with --where KEY=VALUE"
        )
        return ContrastResult(contrast, "incomplete", reason, None, tuple(comparisons))
    (chosen,) = primary
    if chosen.effect is None:
        mixed = bool(chosen.stratum.mixed_machines) and not chosen.reason.startswith("incomplete")
        return ContrastResult(contrast, "not testable here" if mixed else "incomplete", chosen.reason, chosen, others)
    additional = tuple((name, _mean_of_pairs(contrast, chosen.stratum, of)) for name, of in claim.additional)
    failed = _why_no_test(claim, chosen.effect.whole)
    failed = failed or next((why for gate in claim.gates if (why := gate(chosen, eligible))), "")
    return ContrastResult(contrast, "not testable here" if failed else None, failed, chosen, others, additional)


def _why_no_test(claim: Claim, effect: Estimate) -> str:
    if effect.n < 2:
        return "a single seed decides nothing"
    if effect.identical and not claim.measure.exact:
        return "no spread over seeds: copies of a run, or a number that no seed changes?"
    return ""


def _mean_of_pairs(contrast: Contrast, stratum: Stratum, of: Callable[[Run, Run], float]) -> Estimate:
    """A number of each pair of the first added and the first subtracted arm; mean over bases, or seeds of one base."""
    treated, control = (next(i for i, arm in enumerate(contrast.arms) if arm.sign == sign) for sign in (1, -1))
    by_base: dict[str, list[float]] = {}
    for cell in stratum.cells:
        by_base.setdefault(cell[0], []).append(of(stratum.arms[treated][cell], stratum.arms[control][cell]))
    (first, *more) = by_base.values()
    return mean_ci([fmean(values) for values in by_base.values()] if more else first)


def _why_no_comparison(
    claim: Claim, contrast: Contrast, runs: list[Run], eligible: list[Run], stopped: Sequence[StoppedArm]
) -> tuple[Verdict, str]:
    """There are no runs, perhaps because a gate stopped them, or matched ones that one condition excludes."""
    excuses = [(claim.measure.excuse, claim.where, runs if len(eligible) < len(runs) else [])]
    excuses += [
        (condition.excuse, tuple(other for other in claim.where if other is not condition), eligible)
        for condition in claim.where
        if condition.excuse
    ]
    for excuse, where, candidates in excuses:
        excluded = {run.path for stratum in match(contrast, where, candidates) for run in stratum.runs}
        if excluded:
            return "not testable here", f"{len(excluded)} matched runs, but {excuse}"
    if why := why_stopped(contrast, (*claim.where, *claim.primary), stopped):
        return "not testable here", why
    return "incomplete", NO_RUNS


def _voting_effects(claim: Claim, results: Sequence[ContrastResult]) -> list[Estimate]:
    """The effects of the contrasts that vote and can be tested."""
    primary = [result.primary for result in results if result.contrast.votes and not result.status]
    effects = [comparison.effect.whole for comparison in primary if comparison and comparison.effect]
    return [replace(effect, exact=claim.measure.exact) for effect in effects]


def _p_values(claim: Claim, results: Sequence[ContrastResult]) -> tuple[float, float, float]:
    """One-sided p-values for the claim, for its opposite, and for an effect within the margin; NaN if not tested.

    The first and the last need all contrasts, the opposite only one of them.
    """
    votes = sum(result.contrast.votes for result in results)
    effects = _voting_effects(claim, results)
    if not effects:
        return math.nan, math.nan, math.nan
    margin = claim.measure.margin
    within = [effect.p_within(margin) for effect in effects]
    if claim.expected == "same":
        claimed, opposite = within, [effect.p_outside(margin) for effect in effects]
    else:
        claimed, opposite = [e.p_above(0.0) for e in effects], [e.p_below(0.0) for e in effects]
        if claim.expected == "less":
            claimed, opposite = opposite, claimed
    reversed_ = min(1.0, votes * min(opposite))
    if len(effects) < votes:
        return math.nan, reversed_, math.nan
    return max(claimed), reversed_, math.nan if claim.expected == "same" else max(within)


def _verdict(
    claim: Claim, results: tuple[ContrastResult, ...], as_claimed: bool, direction: float, within: float, level: float
) -> ClaimResult:
    effects, margin = _voting_effects(claim, results), claim.measure.margin
    directed = effects if claim.expected != "same" else []
    detectable = max((effect.detectable(level) for effect in directed), default=math.nan)
    counts = [effect.repetitions_needed(margin, level) for effect in directed]
    needed = max((count for count in counts if count), default=None) if None not in counts else None
    failed = [result for result in results if result.contrast.votes and result.status]
    small = within <= SMALLNESS
    verdict: Verdict = "undecided"
    reason = ""
    if direction <= DIRECTION and as_claimed:
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
    enough = all if verdict == "supported" else any
    beyond_margin = enough(min(e.p_above(margin), e.p_below(-margin)) <= SMALLNESS for e in effects)
    if verdict in ("supported", "reversed") and claim.expected != "same" and not beyond_margin:
        reason = "whether by as much as the margin is open"
    return ClaimResult(claim, results, verdict, reason, float(direction), float(within), detectable, needed)
