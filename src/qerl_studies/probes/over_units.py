"""What the probes of a study say of weight formats: numbers of each unit, paired with its first format.

Intervals are Student's t over the units that were measured in a format; of a single one, accuracies have intervals over
questions and other numbers none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qerl_core.statistics import Estimate, mean_ci
from qerl_studies.effects.estimate import of_shares, over_units
from qerl_studies.probes.numbers import DRAFTED, accuracy, pass_at
from qerl_studies.probes.simex import DEGREES, extrapolated

Record = Mapping[str, Any]  # the probe of a unit
Number = Callable[[Record, str], Any]  # of a unit in one of its weight formats: one, or one for each question


def detailed(probes: Sequence[Record]) -> list[Record]:
    """The probes with details, which say more than gates need."""
    return [one for one in probes if one["formats"] and all("temperatures" in it for it in one["formats"].values())]


def formats_of(probes: Sequence[Record]) -> list[str]:
    """The weight formats that any has, the first being what others are compared with: all have it."""
    return list(dict.fromkeys(quant for one in probes for quant in one["formats"]))


def measured_in(quant: str, units: Sequence[Record]) -> list[Record]:
    """Those of the units that have this format; a probe that was stopped lacks the last ones."""
    return [one for one in units if quant in one["formats"]]


def word_of(record: Record, key: str) -> str | None:
    """What the words of a unit set `key` to."""
    values = [word.partition("=")[2] for word in record["unit"] if word.partition("=")[0] == key]
    return values[0] if values else None


def groups(probes: Sequence[Record]) -> dict[str, list[Record]]:
    """The units that are averaged, by what they have in common: a model, or the size of the dither of its copies."""
    found: dict[str, list[Record]] = {}
    for one in probes:
        model = word_of(one, "model.id") or word_of(one, "model")
        scale = word_of(one, "model.dither_scale")
        name = model or (f"copies, dither of {scale} cell variances" if scale else "")
        found.setdefault(name, []).append(one)
    return found


def asked(record: Record, quant: str, temperature: str) -> Mapping[str, Any]:
    return record["formats"][quant]["temperatures"][temperature]


def mean_of(units: Sequence[Record], quant: str, number: Number) -> Estimate:
    """Over the units that have the format; of a single one over its questions, if they have a number each."""
    found = [number(one, quant) for one in measured_in(quant, units)]
    if len(found) == 1 and np.size(found[0]) > 1:
        return over_units(np.reshape(found[0], (-1, 1)), "drawn")
    return mean_ci([np.mean(one) for one in found])


def mean_accuracy(units: Sequence[Record], quant: str, temperature: str, column: str = "correct") -> Estimate:
    """Accuracy, strict or `lenient`; NaN without the latter."""
    found = [asked(one, quant, temperature) for one in measured_in(quant, units)]
    if len(found) == 1 and found[0][column] is not None:
        return accuracy(found[0], column)
    return of_shares(mean_of(units, quant, right_at(temperature, column)))


def minus(first: str, number: Number) -> Number:
    """The difference to the same unit in the first format."""
    return lambda record, quant: number(record, quant) - number(record, first)


def log_over(first: str, number: Number) -> Number:
    """The logarithm of a positive number over that of the same unit in the first format."""
    return lambda record, quant: np.log(np.divide(number(record, quant), number(record, first)))


def right_at(temperature: str, column: str = "correct") -> Number:
    """The share of right answers to each question; NaN without the column."""

    def of(record: Record, quant: str) -> np.ndarray:
        found = asked(record, quant, temperature)
        return np.array(math.nan if found[column] is None else found[column]) / found["samples"]

    return of


def entropy_at(temperature: str) -> Number:
    return lambda record, quant: asked(record, quant, temperature)["entropy"]


def entropy_of_part(part: int) -> Number:
    """Of the answers at temperature 1; NaN if no completion has tokens there."""
    return lambda record, quant: asked(record, quant, "1")["entropy_by_part"][part] or math.nan


def share_at(temperature: str, key: str) -> Number:
    """The mean that answers have under `key`: tokens, found or finished."""
    return lambda record, quant: asked(record, quant, temperature)[key]


def pass_k(temperature: str, k: int) -> Number:
    return lambda record, quant: pass_at(asked(record, quant, temperature), k).value


def kl(way: str) -> Number:
    return lambda record, quant: record["formats"][quant]["kl"][way]


def drafts(part: str, whole: str) -> Number:
    """The ratio of two sums of `drafting` over the questions of a record, NaN of an earlier one.

    One number a question: their mean is the ratio, and their spread is the error of a ratio to first order.
    """

    def of(record: Record, quant: str) -> np.ndarray | float:
        if "draft" not in record["formats"][quant]:
            return math.nan
        parts, wholes = (np.array(record["formats"][quant]["draft"][name]) for name in (part, whole))
        ratio = parts.sum() / wholes.sum()
        return ratio + (parts - ratio * wholes) / wholes.mean()

    return of


DRAFTS = {
    "acceptance as a draft": drafts("accepted", "tokens"),
    f"tokens per verification of {DRAFTED} drafts": drafts("tokens", "verifications"),
}


def distances(units: Sequence[Record]) -> dict[str, Number]:
    """How far a format is from the first, by what it is called; as a draft only if a unit has that."""
    drafted = any("draft" in one for unit in units for one in unit["formats"].values())
    kls = {"KL on own answers": kl("own"), "KL on answers of the first": kl("of_reference")}
    return kls | (DRAFTS if drafted else {})


def dose(at: int, key: str) -> Number:
    """What noise number `at` of the curve does: its KL, the logarithm of the ratio of entropy, or the difference of
    accuracy."""

    def of(record: Record, quant: str) -> float:
        quiet, noisy = (record["formats"][quant]["curve"][one][key] for one in (0, at))
        if key == "kl":
            return noisy
        return math.log(noisy / quiet) if key == "entropy" else noisy - quiet

    return of


def by_scale(probes: Sequence[Record]) -> dict[float, dict[str, Record]]:
    """Copies by size of dither, then by seed of the copy: those that all sizes have, in all formats. Empty with one
    size.
    """
    by_size: dict[float, dict[str, Record]] = {}
    formats = {*formats_of(probes)}
    for record in (probe for probe in probes if formats <= probe["formats"].keys()):
        scale, copy = word_of(record, "model.dither_scale"), word_of(record, "model.dither")
        if scale is not None and copy is not None:
            by_size.setdefault(float(scale), {})[copy] = record
    if len(by_size) < 2:
        return {}
    shared = set.intersection(*({*copies} for copies in by_size.values()))
    ordered = [copy for copy in next(iter(by_size.values())) if copy in shared]
    return {scale: {copy: by_size[scale][copy] for copy in ordered} for scale in sorted(by_size)} if shared else {}


def without_error(scaled: Mapping[float, Mapping[str, Record]], quant: str, number: Number) -> dict[str, Estimate]:
    """A number of copies extrapolated to no rounding error of the file, by each polynomial there are scales for."""
    values = np.array([[np.mean(number(one, quant)) for one in copies.values()] for copies in scaled.values()])
    return {
        name: mean_ci(extrapolated([*scaled], values.T, degree))
        for name, degree in DEGREES.items()
        if len(scaled) > degree
    }
