"""The numbers of answers: right ones by question, pass@k, groups with signal, entropies by place, limits of length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qerl_core.statistics import Estimate, found_among, over_questions, over_samples, pass_at_k
from qerl_studies.effects.estimate import of_shares, share

MOST_CUT = 0.03  # share of answers
DRAFTED = 4  # tokens before each pass of a policy that verifies drafts
PARTS = 10  # of a completion, whose entropies are told apart


def enough_tokens(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The smallest limit that would cut off at most MOST_CUT of these answers; None if their own has cut off more."""
    lengths = sorted(row["tokens"] if row["finished"] else math.inf for row in rows)
    enough = lengths[len(lengths) - 1 - int(MOST_CUT * len(lengths))]
    return None if enough == math.inf else int(enough)


def counts(rows: Sequence[Mapping[str, Any]], column: str, samples: int) -> list[int]:
    """How many of the `samples` adjacent rows of each question have `column`."""
    values = [bool(row[column]) for row in rows]
    return [sum(values[first : first + samples]) for first in range(0, len(values), samples)]


def by_part(entropies: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Sums of entropy and numbers of tokens, (PARTS,) each, by the place of a token in its completion.

    Token t of n, from 0, lies in part floor(PARTS t / n).
    """
    sums, tokens = np.zeros(PARTS), np.zeros(PARTS)
    for values in entropies:
        parts = PARTS * np.arange(len(values)) // max(1, len(values))
        sums += np.bincount(parts, weights=np.asarray(values, dtype=float), minlength=PARTS)
        tokens += np.bincount(parts, minlength=PARTS)
    return sums, tokens


def accuracy(found: Mapping[str, Any], column: str = "correct") -> Estimate:
    """The accuracy over questions of what `numbers` keeps; of the `lenient` one too."""
    rows = _answers(found, column)
    return of_shares(over_samples(rows)) if found["samples"] > 1 else share([right > 0 for (right,) in rows])


def pass_at(found: Mapping[str, Any], k: int) -> Estimate:
    return pass_at_k(_answers(found, "correct"), k)


def signal(found: Mapping[str, Any], group: int) -> Estimate:
    """The share of groups of so many answers, or of all if there are fewer, in which some are right and some wrong."""
    asked = found["samples"]
    size = min(group, asked)
    some = [found_among(size, asked, right) + found_among(size, asked, asked - right) for right in found["correct"]]
    return over_questions([one - 1 for one in some])


def of_scale(measured: Mapping[str, Any], sigma: float) -> str:
    """`sigma` as a share of the median norm scale of a policy; - where noise is not in norms, or none was measured."""
    median = measured.get("norm_scale")  # which earlier probes did not keep
    return "-" if median is None else f"{sigma / median:.2g}"


def _answers(found: Mapping[str, Any], column: str) -> list[list[float]]:
    return [[1.0] * right + [0.0] * (found["samples"] - right) for right in found[column]]
