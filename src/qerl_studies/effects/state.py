"""What an interval or a test shows of an effect: the one place where numbers become a state, and a state a word.

A state has a direction and a size, and both can be shown at once. Where no test was made it has a mode in their place.
Its `word` is one of WORDS, the same on all pages. Verdicts keep the words of their protocols, and have it beside them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from qerl_core.statistics import Estimate

WORDS = {  # what each says of a claim of "more" or "less"; of a contrast without a claim, "more" stands for claimed
    "supported": "the effect has the direction that is claimed",
    "opposite": "the effect has the other direction",
    "no difference beyond the margin": "the whole interval lies within the margin, the smallest effect that matters",
    "not decided": "tested, and none of these is shown",
    "not tested": "no test could be made: a gate failed, or runs are missing, which is named",
}
AND_SMALL = ", within the margin"  # behind a direction
GATES = {"yes": "pass", "no": "fail", "neither": "open"}  # what was measured of a gate, in the words of pages


@dataclass(frozen=True)
class State:
    """`direction` is 1 as claimed, or above 0 where nothing is claimed, -1 against that, and 0 if neither is shown;
    `within`: shown to lie within the margin; `untested`: why nothing more could be tested, empty if all was. `harm`:
    the opposite of a claim that exploration helps, where nothing shows that exploration can pay.
    """

    direction: int = 0
    within: bool = False
    untested: str = ""
    harm: bool = False

    @property
    def tested(self) -> bool:
        return bool(self.direction or self.within or not self.untested)

    @property
    def kind(self) -> Literal["supported", "opposite", "within", "open"]:
        """What colors tell apart, here and in the styles of pages: a direction before a size."""
        if self.direction:
            return "supported" if self.direction > 0 else "opposite"
        return "within" if self.within else "open"

    @property
    def word(self) -> str:
        supported, opposite, same, undecided, untested = WORDS
        if self.direction:
            return (supported if self.direction > 0 else opposite) + AND_SMALL * self.within
        return same if self.within else undecided if self.tested else untested

    @property
    def of_claim(self) -> str:
        """The word of a claim's verdict."""
        if self.direction:
            word = "supported" if self.direction > 0 else "harms" if self.harm else "reversed"
            return word + " but negligible" * self.within
        return "negligible" if self.within else self.untested or "undecided"

    @property
    def of_contrast(self) -> str:
        """The word of a study's own contrast, which has its size only where it has no direction."""
        return {1: "higher", -1: "lower"}.get(self.direction) or ("negligible" if self.within else "open")

    @property
    def of_pair(self) -> str:
        """The word of any two arms, of which the size comes first."""
        if self.direction and not self.within:
            return "higher" if self.direction > 0 else "lower"
        return State(within=self.within, untested=self.untested).word


def of_all(states: Sequence[State]) -> State:
    """What several tests show together: what each of them shows at its own level, which needs no correction."""
    directions = {state.direction for state in states}
    untested = "; ".join(dict.fromkeys(state.untested for state in states if state.untested))
    return State(directions.pop() if len(directions) == 1 else 0, all(state.within for state in states), untested)


def of_interval(estimate: Estimate, margin: float) -> State:
    """What a 95 % interval leaves; not adjusted for how many are looked at. No size without a margin, 0."""
    if not estimate.stderr > 0:
        return State(untested="no interval")
    within = bool(margin) and -margin < estimate.low and estimate.high < margin
    return State(int(estimate.low > 0) - int(estimate.high < 0), within)


def of_look(estimate: Estimate, p: float, level: float, margin: float | None) -> State:
    """What a look at a primary contrast shows, by its adjusted `p`; its size only with a `margin`, at the last look."""
    direction = int(math.copysign(1, estimate.value)) if p <= level else 0
    return State(direction, margin is not None and of_interval(estimate, margin).within)
