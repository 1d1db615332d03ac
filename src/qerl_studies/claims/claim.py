"""A claim of a paper as data, and what runs say about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from qerl_core.checks import check_fields, count, flag, one_of, require, text
from qerl_core.statistics import Estimate
from qerl_studies.claims.estimate import Comparison
from qerl_studies.claims.match import Contrast, Filter, confounders
from qerl_studies.claims.preconditions import Gate
from qerl_studies.effects.estimate import Effect
from qerl_studies.effects.state import State
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import Measure

NO_RUNS = "no runs"
Status = Literal["not testable here", "incomplete"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One statement of a paper, and how runs can support or contradict it: a file of conf/claim, read by read.py."""

    family: str  # claims that are corrected for their number together, and shown in one table
    number: int  # its place there
    paper: str
    address: str  # arXiv number, or a page
    title: str
    statement: str
    reported: str  # the paper's own numbers, in a few words
    reported_effects: tuple[float, ...]  # the same in units of the measure, for figures
    source: str  # where the paper says it, under which conditions, and in what ours differ
    expected: Literal["more", "less", "same"]
    measure: Measure
    where: tuple[Filter, ...]  # which runs count at all
    primary: tuple[Filter, ...]  # the one setting of them that votes
    contrasts: tuple[Contrast, ...]
    gates: tuple[Gate, ...]
    explores: bool  # says that exploration helps
    exploratory: bool  # named after there were data
    additional: tuple[tuple[str, Callable[[Run, Run], float]], ...]  # numbers of pairs, shown without a verdict
    command: str  # makes the runs: with the built-in model and task, unless the claim is about a GPU
    at_scale: str  # makes the runs with the paper's models, including arms for a matched contrast that the paper lacks

    def __post_init__(self) -> None:
        texts = ("family", "paper", "address", "title", "statement", "reported", "source", "command", "at_scale")
        directions = one_of("more", "less", "same")
        check_fields(self, "", **dict.fromkeys(texts, text), number=count(), expected=directions)
        check_fields(self, "", explores=flag, exploratory=flag)
        require(
            bool(self.primary) and any(contrast.votes for contrast in self.contrasts),
            f"the claim {self.title!r} names no primary contrast: give it a contrast that votes, and in `primary` the "
            "conditions of its one setting, before there are data",
        )


@dataclass(frozen=True)
class ContrastResult:
    """What the runs say about one contrast. `primary` is the comparison that votes, if there is exactly one."""

    contrast: Contrast
    status: Status | None  # not testable here or incomplete, because of `reason`; None if it can be tested
    reason: str
    primary: Comparison | None = None
    others: tuple[Comparison, ...] = ()
    additional: tuple[tuple[str, Estimate], ...] = ()

    @property
    def effect(self) -> Effect | None:
        return self.primary.effect if self.primary else None

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
    state: State
    reason: str
    p_direction: float = math.nan
    p_within: float = math.nan
    detectable: float = math.nan  # smallest effect found with a power of 80 %, at the strictest level of Holm's method
    needed: int | None = None  # units, bases or seeds, with which an effect of one margin would be found so
    greedy: ClaimResult | None = None  # the same claim about greedy answers, if it is about sampled ones
    way: str = ""  # of sampling answers, where greedy ones have another verdict

    @property
    def verdict(self) -> str:
        """The word of the state; both words, each with its way of answering, if they differ."""
        return self._told(lambda state: state.of_claim).replace("undecided", "open" if self.way else "undecided")

    @property
    def word(self) -> str:
        """The same in the words of effects/state.py."""
        return self._told(lambda state: state.word)

    def _told(self, word: Callable[[State], str]) -> str:
        if not (self.way and self.greedy):
            return word(self.state)
        return f"{word(self.state)} {self.way}, {word(self.greedy.state)} greedy"

    @property
    def voting(self) -> list[ContrastResult]:
        return [result for result in self.contrasts if result.contrast.votes]


def is_touched(result: ClaimResult) -> bool:
    """Whether runs say anything of it: an effect, or a reason that is another than that there are none of an arm."""
    has_effect = any(one.effect is not None for one in result.voting)
    lacking = [one == NO_RUNS or one.startswith(f"{NO_RUNS} of ") for one in result.reason.split("; ")]
    return has_effect or not all(lacking)


def greedy_text(claim_result: ClaimResult, result: ContrastResult) -> str:
    """The effect on greedy answers of the same contrast, or why there is none."""
    if claim_result.greedy is None:
        return "-"
    greedy = claim_result.greedy.contrasts[claim_result.contrasts.index(result)]
    effect = greedy.effect
    if effect is not None:
        return claim_result.claim.measure.estimate_text(effect.whole)
    return "-" if result.effect is None else greedy.reason
