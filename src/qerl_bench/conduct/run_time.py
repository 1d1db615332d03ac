"""How long the runs of a study take, by finished runs of the same size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from qerl_core.checks import require
from qerl_core.options.fingerprint import flat
from qerl_studies.runs.load import Run

# a run of other numbers takes another time, and not in proportion: start, evaluations and lengths have their own
SIZE = ("steps", "rollout.prompts_per_step", "rollout.group_size", "task.max_completion_tokens")
REMEDY = "finish one there, or say it in place of runs= with run_minutes=MINUTES"


def size_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    config = flat(dict(tree))
    return {key: config.get(key) for key in SIZE}


def minutes_of(runs: Sequence[Run], arms: Sequence[Mapping[str, Any]], where: str) -> float:
    """The median of the finished `runs` in `where` that have the size of one of the `arms`, which are configs.

    Raises ConfigError if there is none.
    """
    timed = [run for run in runs if "wall_s" in run.done]
    require(bool(timed), f"no run in {where} is finished, so none tells how long one takes: {REMEDY}")
    sizes = [size_of(arm) for arm in arms]
    alike = [run.done["wall_s"] for run in timed if size_of(run.config) in sizes]
    other = size_of(timed[0].config)
    differ = [key for key in SIZE if other[key] != sizes[0][key]]
    require(
        bool(alike),
        f"runs in {where} are of another size than the study's ({', '.join(f'{key}={other[key]}' for key in differ)} "
        f"there, {', '.join(f'{key}={sizes[0][key]}' for key in differ)} here), so none tells how long one takes: "
        + REMEDY,
    )
    return median(alike) / 60
