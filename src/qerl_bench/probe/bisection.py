"""Finds the noise with a wanted effect: bisection on a logarithmic scale of a function that rises with the noise."""

from __future__ import annotations

import math
from collections.abc import Callable

LEAST, MOST = 1e-4, 10.0  # of sigma; the scales it is added to are about 1
TOLERANCE = 0.1  # of the effect, as a share of the wanted one; other draws of noise differ by more
SPACING = 1.1  # sigmas this near to each other are one: the effect is sampled, and two draws of it differ by more
DIGITS = 3  # of sigma, which stands in the config of a run


def find_sigma(effect: Callable[[float], float], wanted: float, start: float) -> tuple[float | None, list[list[float]]]:
    """The sigma with `effect(sigma)` near `wanted`, and all pairs (sigma, effect) that were tried.

    Near is within TOLERANCE, or, where sigmas of a SPACING have no such effect, the nearest of those that were tried.
    None if no sigma from LEAST to MOST has it. `effect` should use the same random numbers for every sigma.
    """
    tried: list[list[float]] = []

    def above(sigma: float) -> bool:
        tried.append([sigma, effect(sigma)])
        return tried[-1][1] > wanted

    low = high = start
    if above(start):
        while above(low := low / 2):
            high = low
            if low < LEAST:
                return None, tried
    else:
        while not above(high := high * 2):
            low = high
            if high > MOST:
                return None, tried
    while high / low > SPACING and abs(tried[-1][1] - wanted) > TOLERANCE * wanted:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if above(middle) else (middle, high)
    best = min(tried, key=lambda pair: abs(pair[1] - wanted))[0]
    return float(f"{best:.{DIGITS}g}"), tried
