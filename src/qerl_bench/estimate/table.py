"""The committed table behind estimates, rates.json: fitted rates, how far measured runs lie from them, and lengths.

Rates alone are right to a factor of about 1.5 for a new shape. Near a measured run its own deviation is known, so an
estimate is multiplied by a mean of those of the runs near it, each weighted by how near it is. Far from all of them
nothing is multiplied. `benchmarks/estimate.py fit` writes the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from qerl_bench.estimate.seconds import Rates
from qerl_bench.estimate.work import Work

RATES = Path(__file__).with_name("rates.json")
OWN_WEIGHT = 0.2  # of no deviation, beside the weights of measured runs, each at most 1


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Where a measured setting lies, and the logarithm of its time over that of the rates; None: was not recorded."""

    session: str
    model: str
    place: tuple[float, ...]
    rollout: float | None
    train: float | None


class Length(NamedTuple):
    """Mean tokens of a completion in committed runs of a task with a model."""

    task: str
    model: str
    limit: int
    tokens: float


class RateTable(NamedTuple):
    rates: Rates
    runs: tuple[Measured, ...]
    lengths: tuple[Length, ...]


@cache
def table() -> RateTable:
    stored = json.loads(RATES.read_text())
    runs = tuple(Measured(**{**run, "place": tuple(run["place"])}) for run in stored["runs"])
    return RateTable(Rates(**stored["rates"]), runs, tuple(Length(**one) for one in stored["lengths"]))


def place_of(work: Work) -> tuple[float, ...]:
    """Coordinates of a run, in which 1 is a factor of 2: weights, completions, their tokens, runs on the card; and
    whether weights are packed (1), every weight is trained (3), and what is computed again (1, 2)."""
    whole = work.sizes.block_weights + work.sizes.head_weights
    numbers = (whole, work.completions, work.tokens, work.per_card)
    again = {"none": 0.0, "selective": 1.0, "full": 2.0}[work.recompute]
    packed = float(work.bits < 8 * work.width)
    return (*(round(math.log2(number), 3) for number in numbers), packed, 0.0 if work.rank else 3.0, again)


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    return math.dist(one, other)


def corrected(seconds: float, phase: str, place: Sequence[float], runs: Iterable[Measured]) -> float:
    """`seconds` of rates, times the weighted geometric mean of the deviations of `runs` in `phase`."""
    total, weights = 0.0, OWN_WEIGHT
    for run in runs:
        if (deviation := getattr(run, phase)) is not None:
            weight = math.exp(-(distance(place, run.place) ** 2) / 2)
            total, weights = total + weight * deviation, weights + weight
    return seconds * math.exp(total / weights)


def nearest(place: Sequence[float], runs: Iterable[Measured]) -> tuple[float, Measured]:
    """The distance of the nearest of `runs`, and which it is."""
    return min(((distance(place, run.place), run) for run in runs), key=lambda found: found[0])
