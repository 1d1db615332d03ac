"""The contrasts of part 2 of the fair test, as rates/protocol.md says them, as pure functions of a table of runs.

A table has a row for each run, with the columns arm (with its rate, as nvfp4-2e-4), copy, session, first and last (the
reward in the first four and the last eight steps), and measures such as late. Each copy has all arms, in one session.

Where the protocol is silent:
- A contrast is fitted on the runs of its own arms and rates, as simulate.py does it. What answering costs is fitted on
  the difference within each policy; sessions are coded around zero, so that its mean is that of all copies.
- Below eight copies the word is *not decided*, whether or not an arm trained. Holm does not count what is not tested.
- The standard error of an arm's two rates is over copies, of their paired difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from qerl_core.statistics import Estimate, holm, mean_ci

KINDS = ("bf16", "nvfp4", "four-six")
RATES = ("2e-4", "4e-4")  # of which one is an arm's own best
PAIRS = (("four-six", "bf16"), ("nvfp4", "bf16"), ("four-six", "nvfp4"))  # the first two are primary
COPIES, LEVEL, MARGIN = 8, 0.05, 0.01

Table = Any  # a DataFrame, of whose columns its types know nothing
Weights = Mapping[str, float]  # by arm
Asked = Mapping[str, tuple[Weights, str]]  # weights and the measure, by the name of the contrast


def kind_of(arm: str) -> str:
    """nvfp4 of nvfp4-2e-4."""
    return arm[: -len("-2e-4")]


def effect(rows: Table, weights: Weights, measure: str = "late") -> Estimate:
    """The weighted sum of arms, by least squares with arm (and rate) and session as fixed effects.

    The error has the residual's degrees of freedom, and is NaN if there are none. `n` is the number of copies.
    """
    rows = rows[rows["arm"].isin([*weights])]
    arms = np.array([[one == arm for arm in weights] for one in rows["arm"]], dtype=float)  # (runs, arms)
    others = sorted({*rows["session"]})[1:]
    sessions = np.array([[one == other for other in others] for one in rows["session"]], dtype=float)
    design = np.hstack([arms, sessions - sessions.mean(0)])
    inverse, values = np.linalg.pinv(design.T @ design), rows[measure].to_numpy()
    found, asked = inverse @ design.T @ values, np.array([*weights.values(), *[0.0] * len(others)])
    freedom = len(values) - int(np.linalg.matrix_rank(design))
    variance = float(((values - design @ found) ** 2).sum()) / freedom if freedom > 0 else math.nan
    error = math.sqrt(variance * float(asked @ inverse @ asked))
    return Estimate(float(asked @ found), error, rows["copy"].nunique(), freedom)


class Contrast(NamedTuple):
    """`p` is before Holm, `adjusted` after it; both are NaN where nothing was tested."""

    found: Estimate
    p: float
    adjusted: float
    word: str


def tested(
    rows: Table,
    asked: Asked,
    margin: float = MARGIN,
    copies: int = COPIES,
    enough: Callable[[Iterable[bool]], bool] = all,
) -> dict[str, Contrast]:
    """The contrasts of one table, by name; none is decided by fewer than so many copies.

    `enough` says of which arms trained whether a contrast was tested.
    """
    found = {name: effect(rows, *one) for name, one in asked.items()}
    trained = [enough(has_trained(rows, arm) for arm in weights) for weights, _ in asked.values()]
    raw = [one.p_outside(0.0) if ok else math.nan for one, ok in zip(found.values(), trained, strict=True)]
    each = zip(found.values(), raw, holm(raw).tolist(), trained, strict=True)
    contrasts = [
        Contrast(one, p, adjusted, word_of(one, adjusted, ok, margin, copies)) for one, p, adjusted, ok in each
    ]
    return dict(zip(found, contrasts, strict=True))


def word_of(found: Estimate, p: float, trained: bool = True, margin: float = MARGIN, copies: int = COPIES) -> str:
    """The protocol's word."""
    if found.n < copies:
        return "not decided"
    if not trained:
        return "not tested"
    if p < LEVEL:
        return "higher" if found.value > 0 else "lower"
    within = found.low >= -margin and found.high <= margin
    return "no difference beyond the margin" if within else "not decided"


def has_trained(rows: Table, arm: str) -> bool:
    of = rows[rows["arm"] == arm]
    return bool(of["last"].mean() > of["first"].mean())


def rewards(rows: Table, kind: str) -> np.ndarray:
    """In the last steps, at each rate: (rates, copies)."""
    return np.array([rows[rows["arm"] == f"{kind}-{rate}"].sort_values("copy")["last"] for rate in RATES])


def own_best(rows: Table, kind: str) -> str:
    """The arm of this kind at the rate with the higher reward; of equals the lower."""
    lower, higher = rewards(rows, kind).mean(axis=1)
    return f"{kind}-{RATES[int(higher > lower)]}"


def by_chance(rows: Table, kind: str) -> bool:
    """Whether the rewards of its two rates differ by less than the standard error of their difference."""
    found = mean_ci(rewards(rows, kind)[1] - rewards(rows, kind)[0])
    return abs(found.value) < found.stderr


def primary(rows: Table) -> Asked:
    pairs = [minus(*(own_best(rows, kind) for kind in pair)) for pair in PAIRS[:2]]
    rate = minus("nvfp4-4e-4", "bf16-4e-4") | minus("bf16-2e-4", "nvfp4-2e-4")
    return {named(one): (one, "late") for one in pairs} | {"(nvfp4 - bf16) at 4e-4 - the same at 2e-4": (rate, "late")}


def costs(rows: Table) -> Asked:
    """The second table."""
    nvfp4, bf16 = (own_best(rows, kind) for kind in PAIRS[1])
    return {
        f"answering: {nvfp4} in BF16 - in NVFP4": ({nvfp4: 1.0}, "answering"),
        f"learning: {nvfp4} - {bf16}, both in BF16": (minus(nvfp4, bf16), "sampled in bf16"),
    }


def at_other_rates(rows: Table) -> list[Weights]:
    """The primary contrasts at rates that may have been best by chance, without those of `primary`."""
    arms = {
        kind: [f"{kind}-{rate}" for rate in RATES] if by_chance(rows, kind) else [own_best(rows, kind)]
        for kind in KINDS
    }
    found = [minus(*pair) for treated, control in PAIRS[:2] for pair in product(arms[treated], arms[control])]
    return [one for one in found if named(one) not in primary(rows)]


def minus(treated: str, control: str) -> dict[str, float]:
    return {treated: 1.0, control: -1.0}


def named(weights: Weights) -> str:
    return " - ".join(weights)
