"""The contrasts of a claim in each setting of matched runs, with their effects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from qerl_core.checks import ConfigError, require
from qerl_studies.claims.match import Contrast, Filter, Stratum, all_accept, labels, match, missing
from qerl_studies.effects.estimate import Effect, effect_of
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import Measure


@dataclass(frozen=True)
class Comparison:
    """One contrast in one setting. `effect` is None if it cannot be computed; `reason` says why."""

    contrast: Contrast
    stratum: Stratum
    label: str
    effect: Effect | None
    reason: str = ""

    def is_in(self, where: Sequence[Filter]) -> bool:
        """Whether every arm meets all conditions."""
        return all(all_accept(where, self.stratum.shared | variant) for variant in self.stratum.variants)


def compare(measure: Measure, contrast: Contrast, where: Sequence[Filter], runs: Sequence[Run]) -> list[Comparison]:
    """The contrast in each setting of `runs` that has all arms, with its effect if the grid is complete.

    Raises ConfigError if arms were asked different questions, and, once for all of them, if runs lack the number.
    """
    strata = match(contrast, where, runs)
    complete = [stratum for stratum in strata if not missing(contrast, stratum) and not stratum.mixed_machines]
    values = _numbers(measure, [run for stratum in complete for run in stratum.runs])
    return [_comparison(contrast, *pair, values) for pair in zip(strata, labels(strata), strict=True)]


def _numbers(measure: Measure, runs: Sequence[Run]) -> dict[Path, pd.Series | float]:
    """The number of each run, or its numbers by question. One ConfigError for all runs that lack them."""
    values: dict[Path, pd.Series | float] = {}
    errors: list[str] = []
    for run in runs:
        if run.path not in values:
            try:
                numbers = measure.metric(run)
                usable = np.isfinite(found := np.asarray(numbers, float)) & ((found > 0) | (not measure.ratio))
                require(bool(usable.all()), f"{run.name} has a number that cannot be compared (NaN, or 0 in a ratio)")
            except ConfigError as error:
                errors.append(str(error))
                numbers = math.nan
            values[run.path] = _log(numbers) if measure.ratio else numbers
    require(
        not errors,
        f"{measure.name} cannot be measured in {len(errors)} of these runs: {'; '.join(errors)}. Leave them out, or "
        "run them again",
    )
    return values


def _log(numbers: pd.Series | float) -> pd.Series | float:
    return numbers.map(math.log) if isinstance(numbers, pd.Series) else math.log(numbers)


def _comparison(contrast: Contrast, stratum: Stratum, label: str, values: dict[Path, pd.Series | float]) -> Comparison:
    if lacking := missing(contrast, stratum):
        return Comparison(contrast, stratum, label, None, f"incomplete grid, missing: {'; '.join(lacking)}")
    if mixed := stratum.mixed_machines:
        reason = f"its arms ran on different machines or library versions: {'; '.join(mixed)}"
        return Comparison(contrast, stratum, label, None, reason)
    signs = tuple(arm.sign for arm in contrast.arms)
    return Comparison(contrast, stratum, label, effect_of(stratum.arms, lambda run: values[run.path], signs))
