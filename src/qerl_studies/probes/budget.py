"""Which part of a model in few bits costs what: Shapley shares of all cells of a precision budget, over copies.

A share is the mean rise that a part brings over all orders in which the parts can be rounded (Shapley 1953). The shares
of a number sum to what it rises from the cell in which nothing is rounded to that in which everything is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import factorial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qerl_core.statistics import Estimate

NAMES: tuple[str, ...] = ("weights", "inputs", "keys", "values", "head", "norms")
KEYS = frozenset({"keys", "values"})
NOTHING = "none"
MEASURES = {  # of a cell, and what a page calls them
    "texts_kl": "KL on the texts",
    "texts_entropy": "entropy on the texts",
    "texts_acceptance": "acceptance as a draft",
    "own_kl": "KL on own samples",
    "own_entropy": "entropy of own samples",
    "right": "right answers",
}
Cells = Mapping[str, Mapping[str, float]]  # numbers by name of the cell


def cell_name(parts: Collection[str]) -> str:
    """The name of the cell in which `parts` are rounded, whatever their order."""
    return "+".join(sorted(parts, key=NAMES.index)) or NOTHING


def measures_of(copies: Mapping[str, Cells]) -> dict[str, str]:
    """Those of MEASURES that the cells have: earlier budgets have no acceptance."""
    (first, *_), *_ = (list(cells.values()) for cells in copies.values())
    return {measure: title for measure, title in MEASURES.items() if measure in first}


def shapley(cells: Cells, parts: Sequence[str], measure: str) -> dict[str, float]:
    """The share of each of `parts` in the rise of a measure; `cells` has all subsets."""
    count = len(parts)
    shares = dict.fromkeys(parts, 0.0)
    for part in parts:
        others = [other for other in parts if other != part]
        for mask in range(2 ** len(others)):
            before = [other for place, other in enumerate(others) if mask >> place & 1]
            weight = factorial(len(before)) * factorial(count - len(before) - 1) / factorial(count)
            rise = cells[cell_name([*before, part])][measure] - cells[cell_name(before)][measure]
            shares[part] += weight * rise
    return shares


def alone(cells: Cells, parts: Sequence[str], measure: str) -> dict[str, float]:
    """The rise that each part brings where nothing else is rounded."""
    return {part: cells[part][measure] - cells[NOTHING][measure] for part in parts}


def last(cells: Cells, parts: Sequence[str], measure: str) -> dict[str, float]:
    """The rise that each part brings where everything else is rounded."""
    whole = cells[cell_name(parts)][measure]
    return {part: whole - cells[cell_name({*parts} - {part})][measure] for part in parts}


def over_copies(
    record: Mapping[str, Any], of: Any, measure: str, parts: Sequence[str] | None = None
) -> dict[str, Estimate]:
    """`of`, one of the functions above, of each of `parts`, by default all: the mean over copies, with its interval."""
    from qerl_core.statistics import mean_ci  # with scipy

    asked: Sequence[str] = record["parts"] if parts is None else parts
    each = [of(cells, asked, measure) for cells in record["copies"].values()]
    return {part: mean_ci([one[part] for one in each]) for part in asked}


def whole(record: Mapping[str, Any], measure: str, parts: Sequence[str] | None = None) -> Estimate:
    """The rise from nothing rounded to all of `parts`, by default everything, over copies."""
    from qerl_core.statistics import mean_ci  # with scipy

    end = cell_name(record["parts"] if parts is None else parts)
    return mean_ci([cells[end][measure] - cells[NOTHING][measure] for cells in record["copies"].values()])
