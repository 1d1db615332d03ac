"""Noise as a dose, on the page of a study: settings that differ in their noise alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from qerl_core.checks import ConfigError
from qerl_core.statistics import mean_ci
from qerl_studies.effects.pairs import by_unit
from qerl_studies.figures.labels import label_settings, sigma_by_step
from qerl_studies.figures.paired import ENTROPY, REWARD_LATE, SAMPLED
from qerl_studies.report.axes import AXES, axis_of
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import Measure
from qerl_studies.runs.settings import Setting, group_by_setting

DOSES = {
    "mean entropy, nats per token": ENTROPY,
    "held-out accuracy, sampled": SAMPLED,
    "reward, mean of the last fifth of the steps": REWARD_LATE,
}


def doses_of(runs: Sequence[Run], place: Mapping[Path, int]) -> list[dict[str, Any]]:
    """Settings that differ in their noise alone, in one place, in series of two levels or more: dose and what it did.

    The dose is the mean of sigma over the steps. A setting whose runs lack a number leaves that number out.
    """
    by_rest: dict[frozenset[tuple[str, str]], list[Setting]] = {}
    settings = group_by_setting(runs)
    for setting in label_settings(settings) if settings else ():
        rest = frozenset(item for item in setting.runs[0].setting_items if not item[0].startswith(("aqn.", "noise.")))
        by_rest.setdefault(rest, []).append(setting)
    series = [
        [one for one in group if one["aqn.name"] == "none" or one["noise.where"] == where]
        for group in by_rest.values()
        for where in (None, "adapters")  # None: in norms
    ]
    doses = []
    for number, group in enumerate(series):
        levels = {id(one): _mean_sigma(one) for one in group}
        known = [one for one in group if levels[id(one)] is not None]
        if len({levels[id(one)] for one in known}) < 2:
            continue
        for setting in sorted(known, key=lambda one: levels[id(one)] or 0.0):
            first = setting.runs[0]
            doses.append(
                {
                    "series": number,
                    "label": f"{setting.label}, noise {setting.noise}",
                    "axes": {axis: str(axis_of(first.config_items, key)) for axis, key in AXES.items()},
                    "sigma": levels[id(setting)],
                    "runs": [place[run.path] for run in setting.runs],
                    "measures": [_response(setting, measure) for measure in DOSES.values()],
                }
            )
    return doses


def _mean_sigma(setting: Setting) -> float | None:
    """The mean noise of a setting's runs, of which matched noise has one by base; 0 without noise, None if a run has no
    record of it.
    """
    if setting["aqn.name"] == "none":
        return 0.0
    sigmas = [sigma_by_step(run).mean() for run in setting.runs]
    return None if any(map(math.isnan, sigmas)) else float(f"{fmean(sigmas):.4g}")


def _response(setting: Setting, measure: Measure) -> dict[str, Any] | None:
    try:
        values = {run.path: measure.number(run) for run in setting.runs}
    except ConfigError:
        return None
    mean = mean_ci(by_unit(setting.runs, lambda run: values[run.path]))
    return {"mean": [mean.value, mean.low, mean.high], "n": mean.n, "values": [*values.values()]}
