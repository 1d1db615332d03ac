"""What gates read of bases and runs: one number of a probe, or of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import comb
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from qerl_core.checks import require
from qerl_core.statistics import pass_at_k
from qerl_studies.design.design import Design
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import LATE, held_out

LONGEST = 0.25  # the share of the held-out questions that count as the longest, at least

Probe = Mapping[str, Any]
Runs = Mapping[tuple[str, int, int], Run]  # by arm, base and seed


def pass_at(probe: Probe, quant: str, k: int) -> float:
    """pass@k of a base in a weight format; pass@1 is the share of right answers."""
    counts = probe["formats"][quant]
    rows = [[1.0] * correct + [0.0] * (counts["samples"] - correct) for correct in counts["correct"]]
    return pass_at_k(rows, min(k, counts["samples"])).value


def by_unit(design: Design, runs: Runs, arm: str, number: Callable[[Run], float]) -> pd.Series:
    """A number of the runs of an arm, by base or, in a design of one model, by seed."""
    return by_base(runs, arm, number, 1 if len(design.units) > 1 else 2)


def by_base(runs: Runs, arm: str, number: Callable[[Run], float], part: int = 1) -> pd.Series:
    """The mean over seeds of a number of the runs of an arm, by base, or by another `part` of their cells."""
    found: dict[int, list[float]] = {}
    for cell, run in runs.items():
        if cell[0] == arm:
            found.setdefault(int(cell[part]), []).append(number(run))
    return pd.Series({unit: fmean(values) for unit, values in found.items()}, dtype=float)


def final(run: Run) -> float:
    """Held-out accuracy after training."""
    return float(np.mean(np.asarray(held_out("sampled")(run))))


def late_rise(run: Run) -> float:
    """How much the accuracy of rollouts rises over the last fifth of the steps, by a straight line."""
    accuracy = run.series("train", "accuracy").dropna()
    late = accuracy.iloc[-max(2, round(LATE * len(accuracy))) :]
    return float(np.polyfit(late.index.to_numpy(), late.to_numpy(), 1)[0] * (late.index[-1] - late.index[0]))


def gain_on_longest(run: Run) -> float:
    """The gain of held-out accuracy on the questions with the most words, which ask for the most steps.

    They are chosen by length, not by the answers, so that luck at the start does not look like a gain.
    """
    answers = run.answers("sampled")
    words = answers.index.to_series().str.count(" ")
    longest = answers[words >= words.quantile(1 - LONGEST)]
    return float(np.mean((longest[run.option("steps")] - longest[0]).to_numpy()))


def mixed_groups(probe: Probe, quant: str, group: int) -> float:
    """Share of groups of so many answers, drawn from those of the probe, that have right and wrong ones."""
    counts = probe["formats"][quant]
    return fmean(mixed_group(right, counts["samples"], group) for right in counts["correct"])


def mixed_group(right: int, samples: int, group: int) -> float:
    """The chance that `group` of the answers to a question, drawn without replacement, are neither all right nor all
    wrong; of fewer samples all of them."""
    size = min(group, samples)
    return 1 - (comb(right, size) + comb(samples - right, size)) / comb(samples, size)


def lenient_gap(probe: Probe, quant: str) -> float | None:
    """Share of answers at temperature 1 that are right by their last number, minus those that are right as asked.

    None if the probe kept no details, or answers are no numbers.
    """
    found = probe["formats"].get(quant, {}).get("temperatures", {}).get("1", {})
    if found.get("lenient") is None:
        return None
    return (sum(found["lenient"]) - sum(found["correct"])) / (found["samples"] * len(found["correct"]))


def gain_where_complete(run: Run) -> float:
    """The gain of sampled held-out answers that have an end before and after training, by their last number.

    So it is neither that answers became short enough for the limit, nor that they took on a format.
    """
    right, ends, last = run.answers("sampled", "lenient"), run.answers("sampled", "finished"), run.option("steps")
    complete = (ends[0] == 1) & (ends[last] == 1)
    return float(np.mean((right[last] - right[0])[complete].to_numpy()))


def above_half_time(run: Run) -> float:
    """Held-out accuracy after training minus that after half of the steps, by the last number of sampled answers.

    Raises ConfigError for a run that was not evaluated then.
    """
    right, last = run.answers("sampled", "lenient"), run.option("steps")
    half = last // 2
    require(half in right, f"{run.name} was not evaluated at half time: eval.at=[{half}]")
    return float(np.mean((right[last] - right[half]).to_numpy()))
