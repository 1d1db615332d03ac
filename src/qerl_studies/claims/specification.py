"""The effect behind a verdict under other choices of answers, start and pooling: a specification curve.

An accuracy can be of sampled or greedy answers, at the end of training, as a gain over the start, or as a mean of late
evaluations, if there are any; its interval can allow for other questions or not. A reward can be of the whole run,
above its own start, or late. Each can be of this study, or pooled over the bases of all studies of its task in which no
gate of the claim failed. Arms with one start, such as noise and none, differ in gain as at the end: shown once.
Entropies and everything about speed have one way only and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qerl_core.checks import ConfigError
from qerl_core.statistics import Estimate, mean_ci
from qerl_studies.claims.claim import Claim, ClaimResult, ContrastResult
from qerl_studies.claims.estimate import Comparison, compare
from qerl_studies.claims.match import Contrast
from qerl_studies.claims.measures import LATE_REWARD, REWARD
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import Measure, area, gained, held_out, last_fifth_mean, late_mean, mean_gain

ANSWERS = {"end": held_out, "gain": gained, "late mean": late_mean}
REWARDS = {"whole run": area, "above its start": mean_gain, "last fifth": last_fifth_mean}


Judged = tuple[Sequence[ClaimResult], Sequence[Run]]  # the verdicts of a study, and its runs


@dataclass(frozen=True)
class Specification:
    """One way to estimate the effect of a contrast. `questions`: the interval allows for other questions too."""

    claim: str
    verdict: str
    contrast: str
    measure: Measure
    way: str  # sampled, end
    pooled: bool
    questions: bool
    estimate: Estimate
    decides: bool  # whether the verdict on the claim is about this one

    @property
    def label(self) -> str:
        return self.way + (", other questions" if self.questions else "") + (", pooled" if self.pooled else "")

    def repeats(self, other: Specification, sign: int = 1) -> bool:
        """Whether both have one effect, or opposite ones with `sign` -1."""
        found = np.array([[one.estimate.value, one.estimate.low, one.estimate.high] for one in (self, other)])
        return np.allclose(found[0], found[1] if sign > 0 else -found[1, [0, 2, 1]], equal_nan=True)


def specifications(
    results: Sequence[ClaimResult], runs: Sequence[Run], others: Sequence[Judged]
) -> list[Specification]:
    """Every specification of each primary contrast that has an effect; `others` are other studies of the task."""
    return [
        one
        for result in results
        for voting in result.voting
        if voting.primary and voting.primary.effect
        for one in _of_contrast(result, voting, runs, others)
    ]


def _of_contrast(
    result: ClaimResult, voting: ContrastResult, runs: Sequence[Run], others: Sequence[Judged]
) -> list[Specification]:
    found: list[Specification] = []
    for way, measure in _ways(result.claim.measure):
        kind = way.split(",")[0]
        shown = {(one.questions, one.pooled): one for one in reversed(found) if one.way.split(",")[0] == kind}
        for one in _of_way(result, voting, way, measure, runs, others):
            twin = shown.get((one.questions, one.pooled))
            if twin is None or not one.repeats(twin):
                found.append(one)
    return found


def _ways(measure: Measure) -> Iterator[tuple[str, Measure]]:
    if measure.answers == "sampled":
        for mode in ("sampled", "greedy"):
            for what, metric in ANSWERS.items():
                yield f"{mode}, {what}", replace(measure, metric=metric(mode), answers=mode, asked=True)
    elif measure.name in (REWARD.name, LATE_REWARD.name):
        for what, metric in REWARDS.items():
            yield f"reward, {what}", replace(measure, metric=metric("reward/mean"))


def _of_way(
    result: ClaimResult,
    voting: ContrastResult,
    way: str,
    measure: Measure,
    runs: Sequence[Run],
    others: Sequence[Judged],
) -> Iterator[Specification]:
    here = _comparison(result.claim, voting.contrast, measure, runs)
    if here is None or here.effect is None:
        return
    effect = here.effect
    decides = effect.whole in _deciding(result, voting.contrast)
    title, label = result.claim.title, voting.contrast.label
    whole = Specification(
        title, result.verdict, label, measure, way, False, effect.questions > 1, effect.whole, decides
    )
    yield whole
    if whole.questions:
        yield replace(whole, questions=False, estimate=effect.fixed, decides=False)
    testable = [more for verdicts, more in others if _is_testable(result.claim, voting.contrast, verdicts)]
    there = [found for more in testable if (found := _comparison(result.claim, voting.contrast, measure, more))]
    if there and effect.unit == "base" and not voting.status:
        effects = [one.effect for one in (here, *there) if one.effect and one.effect.unit == "base"]
        units = np.concatenate([one.by_unit for one in effects])
        yield replace(whole, questions=False, pooled=True, estimate=mean_ci(units), decides=False)


def _deciding(result: ClaimResult, contrast: Contrast) -> list[Estimate]:
    """The effects that the verdict is about: of sampled answers, and of greedy ones if it has a word for them."""
    of_ways = [result, *([result.greedy] if result.greedy else [])]
    votes = [one.primary for way in of_ways for one in way.voting if one.contrast is contrast]
    return [primary.effect.whole for primary in votes if primary and primary.effect]


def _is_testable(claim: Claim, contrast: Contrast, verdicts: Sequence[ClaimResult]) -> bool:
    """Whether another study has the contrast of the claim, and no gate of it failed there."""
    there = (one for result in verdicts if result.claim is claim for one in result.voting if one.contrast is contrast)
    return any(one.primary is not None and not one.status for one in there)


def _comparison(claim: Claim, contrast: Contrast, measure: Measure, runs: Sequence[Run]) -> Comparison | None:
    """The contrast in its primary setting; None where runs lack what is measured, or several settings fit."""
    eligible = [run for run in runs if run.finished and measure.counts(run)]
    try:
        found = [one for one in compare(measure, contrast, claim.where, eligible) if one.is_in(claim.primary)]
    except ConfigError:  # evaluated too seldom for a gain or a late mean
        return None
    return found[0] if len(found) == 1 else None
