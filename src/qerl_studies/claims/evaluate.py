"""From effects to verdicts: effect sizes with confidence intervals, and tests corrected for multiple comparisons.

A claim of "more" or "less" is *supported* if the effect has the direction claimed, *reversed* if it has the other one,
and *negligible* if the whole interval lies within the margin; a direction and a size can both hold. A claim of "same"
is supported within the margin and reversed outside of it. More data can add a word to a verdict, but not make one
false. A claim is *not testable here* if a gate failed, *incomplete* if runs are missing, and *undecided* otherwise.

A claim with several contrasts ("all formats") is supported, or negligible, if all of them show it, which needs no
correction; it is reversed if any shows the opposite, which is corrected by Bonferroni. Holm's method is then applied
over the claims of one model and task, once to the tests of direction (two-sided, 5 %) and once to the tests of
smallness (2.5 %).

Two things limit a word. An accuracy has a verdict for each way of answering, and where the words differ the verdict has
both: reversed at temperature 1, open greedy. And a claim that exploration helps (`explores`) needs a control of
exploration that passed (exploration.py): without it the opposite is called harm, and a lack of help is not testable.

Only the primary setting votes; the claim names it before there are data. Other settings are robustness checks.
Contrasts of the paper's own recipes, which differ in more than the claim is about, are reported without a vote. Holm's
method takes each `family` of claims by itself; those that were named after their data were made are `exploratory`, and
corrected by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from qerl_core.statistics import Estimate, holm, mean_ci
from qerl_studies.claims.blocked import BlockedArm, blocked_arms, which_blocked
from qerl_studies.claims.claim import NO_RUNS, Claim, ClaimResult, ContrastResult, Status
from qerl_studies.claims.estimate import Comparison, compare
from qerl_studies.claims.exploration import why_only_harm
from qerl_studies.claims.match import Contrast, Stratum, all_accept, match, value_text
from qerl_studies.effects.pairs import by_unit
from qerl_studies.effects.state import State
from qerl_studies.runs.load import Run

DIRECTION = 0.05  # level of the two-sided tests of direction, over all claims of a model and task
SMALLNESS = 0.025  # level of the tests that an effect lies within its margin: an interval of 95 %


def evaluate_claims(claims: Sequence[Claim], runs: Sequence[Run]) -> list[ClaimResult]:
    """The verdict on each claim from the finished `runs`. Raises ConfigError, naming runs that lack a number."""
    finished = [run for run in runs if run.finished]
    stopped = blocked_arms(finished)
    only_harm = why_only_harm(finished) if any(claim.explores for claim in claims) else ""
    verdicts: dict[int, ClaimResult] = {}
    corrected: dict[tuple[str, bool], list[int]] = {}
    for i, claim in enumerate(claims):
        corrected.setdefault((claim.family, claim.exploratory), []).append(i)
    for places in corrected.values():
        family = [claims[i] for i in places]
        asked = [replace(claim, measure=claim.measure.greedy or claim.measure) for claim in family]
        sampled = [_tested(claim, finished, stopped) for claim in family]
        greedy = [
            one if other.measure is claim.measure else _tested(other, finished, stopped)
            for one, claim, other in zip(sampled, family, asked, strict=True)
        ]
        ways = [_judged(claims_, of_way, only_harm) for claims_, of_way in ((family, sampled), (asked, greedy))]
        for i, one, other in zip(places, *ways, strict=True):
            verdicts[i] = _by_ways(one, other) if one.claim.measure.greedy else one
    return [verdicts[i] for i in range(len(claims))]


def _tested(claim: Claim, runs: list[Run], stopped: Sequence[BlockedArm]) -> tuple[ContrastResult, ...]:
    return tuple(_test(claim, contrast, runs, stopped) for contrast in claim.contrasts)


def _judged(claims: Sequence[Claim], tested: Sequence[tuple[ContrastResult, ...]], only_harm: str) -> list[ClaimResult]:
    """The verdicts on claims that are corrected for their number together."""
    p = np.array([_p_values(*pair) for pair in zip(claims, tested, strict=True)]).reshape(len(claims), 3)
    two_sided = np.where(np.isnan(p[:, :2]).all(1), np.nan, np.fmin(2 * np.fmin(p[:, 0], p[:, 1]), 1.0))
    direction, within = holm(two_sided), holm(p[:, 2])  # columns of p: claimed, reversed, within
    level = DIRECTION / 2 / max(int((~np.isnan(two_sided)).sum()), 1)
    as_claimed = (p[:, 0] <= p[:, 1]) | np.isnan(p[:, 1])  # False if only the opposite could be tested
    results = [
        _verdict(claim, one, bool(as_claimed[i]), direction[i], within[i], level)
        for i, (claim, one) in enumerate(zip(claims, tested, strict=True))
    ]
    return [_of_harm(one, only_harm) if one.claim.explores and only_harm else one for one in results]


def _of_harm(result: ClaimResult, only_harm: str) -> ClaimResult:
    """What may be said where nothing shows that exploration can pay: help, or harm and its size; no lack of help."""
    state = result.state
    if state.direction > 0:
        return replace(result, state=replace(state, within=False))
    if state.direction < 0:
        told = replace(state, harm=True)
    elif state.within:
        told = State(untested="not testable here")
    else:
        return result
    return replace(result, state=told, reason="; ".join(filter(None, (result.reason, only_harm))))


def _by_ways(sampled: ClaimResult, greedy: ClaimResult) -> ClaimResult:
    """The verdict with both words, if both ways of answering can be judged and they differ."""
    differ = sampled.state.tested and greedy.state.tested and sampled.verdict != greedy.verdict
    return replace(sampled, greedy=greedy, way=_how_sampled(sampled) if differ else "")


def _how_sampled(result: ClaimResult) -> str:
    """At which temperature the answers of the primary contrast were drawn."""
    items = next(one.primary.stratum.shared for one in result.voting if one.primary)
    temperature, top_p = items.get("eval.temperature", 1.0), items.get("eval.top_p", 1.0)
    return f"at temperature {temperature:g}" + (f" and top-p {top_p:g}" if top_p < 1 else "")


def _test(claim: Claim, contrast: Contrast, runs: list[Run], stopped: Sequence[BlockedArm]) -> ContrastResult:
    eligible = [run for run in runs if claim.measure.counts(run)]
    comparisons = compare(claim.measure, contrast, claim.where, eligible)
    if not comparisons:
        return ContrastResult(contrast, *_why_no_comparison(claim, contrast, runs, eligible, stopped))
    if not contrast.votes:
        return ContrastResult(contrast, None, "", None, tuple(comparisons))
    primary = [comparison for comparison in comparisons if comparison.is_in(claim.primary)]
    others = tuple(comparison for comparison in comparisons if comparison not in primary)
    if not primary:
        return ContrastResult(contrast, "incomplete", _what_primary_lacks(claim, others), None, others)
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


def _what_primary_lacks(claim: Claim, others: Sequence[Comparison]) -> str:
    """Which arms of the setting that comes nearest to the primary one have which other values."""
    lacks: list[dict[str, list[str]]] = []
    for other in others:
        arms: dict[str, list[str]] = {}
        for side, variant in zip(other.contrast.arms, other.stratum.variants, strict=True):
            items = other.stratum.shared | variant
            for one in claim.primary:
                if not one.accepts(items):
                    arms.setdefault(f"with {one.asked} (there: {value_text(one.value(items))})", []).append(side.label)
        lacks.append(arms)
    nearest = min(lacks, key=len)
    told = ", ".join(f"{' and '.join(dict.fromkeys(labels))} {what}" for what, labels in nearest.items())
    return f"no runs in the primary setting, which lacks {told}"


def _why_no_test(claim: Claim, effect: Estimate) -> str:
    if effect.n < 2:
        return "a single seed decides nothing"
    if effect.identical and not claim.measure.exact:
        return "no spread over seeds: copies of a run, or a number that no seed changes?"
    return ""


def _mean_of_pairs(contrast: Contrast, stratum: Stratum, of: Callable[[Run, Run], float]) -> Estimate:
    """A number of each pair of the first added and the first subtracted arm; mean over bases, or seeds of one base."""
    sides = [*zip(contrast.arms, stratum.arms, strict=True)]
    treated, control = (next(runs for arm, runs in sides if arm.sign == sign) for sign in (1, -1))
    return mean_ci(by_unit(treated, lambda run: of(run, control[run.cell])))


def _why_no_comparison(
    claim: Claim, contrast: Contrast, runs: list[Run], eligible: list[Run], stopped: Sequence[BlockedArm]
) -> tuple[Status, str]:
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
    if found := which_blocked(contrast, (*claim.where, *claim.primary), stopped):
        why, counts = found
        return "not testable here" if counts else "incomplete", why
    settings = {id(run.config_items): run.config_items for run in eligible}.values()
    none_of = [
        side.label for side in contrast.arms
        if not any(all_accept((*claim.where, *side.where), items) for items in settings)
    ]  # fmt: skip
    some = contrast.votes and 0 < len(none_of) < len(contrast.arms)
    return "incomplete", f"{NO_RUNS} of {' and '.join(none_of)}" if some else NO_RUNS


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
    untested, reason = ("incomplete", NO_RUNS) if math.isnan(direction) else ("", "")
    if failed:
        statuses = {result.status for result in failed}
        untested = "not testable here" if "not testable here" in statuses else "incomplete"
        reason = "; ".join(dict.fromkeys(result.reason for result in failed if result.status == untested))
    state = State((1 if as_claimed else -1) * int(direction <= DIRECTION), bool(within <= SMALLNESS), untested)
    if state.direction or state.within:
        enough = all if state.direction > 0 else any
        beyond = enough(min(e.p_above(margin), e.p_below(-margin)) <= SMALLNESS for e in effects)
        open_size = claim.expected != "same" and not state.within and not beyond
        reason = "whether by as much as the margin is open" if open_size else ""
    return ClaimResult(claim, results, state, reason, float(direction), float(within), detectable, needed)
