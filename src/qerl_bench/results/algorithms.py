"""Algorithms side by side: how they learn, and how much better held-out answers got, with an honest standard error.

Runs of one algorithm should differ in their seed alone; the same questions are asked before and after training, so
gains are paired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from qerl_bench.errors import require
from qerl_bench.results.figures import mean_and_band, moving_average
from qerl_bench.results.load import Run
from qerl_bench.results.stats import Mean, crossed
from qerl_bench.results.style import SPARE_COLOURS, label_axes, legend_above, panels, paper_style

COLOURS = ("#000000", "#0072B2", "#009E73", "#D55E00", *SPARE_COLOURS, "#7F7F7F")
PANELS = ("reward/mean", "entropy")


def by_algorithm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by algorithm, by name. Raises BadInput if one of them has two runs of a seed."""
    require(bool(runs), "no finished run to compare: pass folders that hold some")
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.option("algo.name"), run.option("seed"))):
        groups.setdefault(run.option("algo.name"), []).append(run)
    for name, group in groups.items():
        seeds = [run.option("seed") for run in group]
        require(len(set(seeds)) == len(seeds), f"algo={name} has several runs of one seed ({seeds}): leave some out")
    return groups


def gains(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per algorithm: greedy held-out accuracy before and after training, and the gain with its standard error.

    `gain_se` joins two sources: questions (paired differences, averaged over seeds) and seeds. `gain_z` is their
    quotient, and `worst_z` the smallest quotient of a single seed with its own questions. Entropies are of the first
    and last step.
    """
    return pd.DataFrame([_row(name, group) for name, group in by_algorithm(runs).items()])


def figure(runs: Sequence[Run], smooth: int) -> Figure:
    """Reward and entropy by step: mean over seeds, and its 95 % interval, of each algorithm."""
    groups = by_algorithm(runs)
    with paper_style():
        drawn, axes = panels(1, len(PANELS), 2.1)
        for ax, metric in zip(axes[0], PANELS, strict=True):
            for (name, group), colour in zip(groups.items(), COLOURS * len(groups), strict=False):
                curves = {run.option("seed"): run.series("train", metric) for run in group}
                seeds = pd.DataFrame(curves).dropna()
                mean_and_band(ax, moving_average(seeds, smooth), colour, name)
            label_axes(ax, metric)
        counts = sorted({len(group) for group in groups.values()})
        seeds_shown = f"mean and 95% interval of {' or '.join(map(str, counts))} seeds" if counts[-1] > 1 else ""
        legend_above(drawn, axes[0], [seeds_shown, f"smoothed over {smooth} steps" if smooth > 1 else ""])
    return drawn


def _row(name: str, group: list[Run]) -> dict[str, Any]:
    changes = np.stack([paired_changes(run) for run in group], axis=1)  # (questions, seeds)
    gain = crossed(changes)
    entropies = [run.series("train", "entropy").to_numpy() for run in group]
    greedy = [run.series("eval", "eval/accuracy_greedy").to_numpy() for run in group]
    sampled = [run.series("eval", "eval/accuracy_sampled").to_numpy() for run in group]
    return {
        "algo": name,
        "seeds": len(group),
        "steps": max(run.last_step for run in group),
        "start": np.mean([values[0] for values in greedy]),
        "final": np.mean([values[-1] for values in greedy]),
        "gain": gain.mean,
        "gain_se": gain.error,
        "gain_z": _quotient(gain),
        "worst_z": min(_quotient(crossed(seed)) for seed in changes.T),
        "sampled_final": np.mean([values[-1] for values in sampled]),
        "entropy_first": np.mean([values[0] for values in entropies]),
        "entropy_last": np.mean([values[-1] for values in entropies]),
    }


def paired_changes(run: Run) -> np.ndarray:
    """For each held-out question, sorted, correct after training minus correct before, greedy: (questions,)."""
    answers = run.answers("greedy")
    require(answers.shape[1] > 1, f"{run.path} was not evaluated before and after training: run it with eval=task")
    return (answers.iloc[:, -1] - answers.iloc[:, 0]).to_numpy()


def _quotient(gain: Mean) -> float:
    """0 where nothing changed; infinite where every question changed alike."""
    return gain.mean / gain.error if gain.error > 0 else math.copysign(math.inf, gain.mean) if gain.mean != 0 else 0.0
