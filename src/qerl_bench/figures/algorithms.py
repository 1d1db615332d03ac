"""Algorithms side by side: how they learn, and how much better held-out answers got, with an honest standard error.

Runs of one algorithm should differ in their seed alone; the same questions are asked before and after training, so
gains are paired. Curves are drawn against completions sampled: an algorithm that samples twice as many in a step has
twice as much to learn from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qerl_bench.checks import require
from qerl_bench.figures.paired import by_cell, over_bases, repeated
from qerl_bench.figures.run import mean_and_band, moving_average
from qerl_bench.figures.style import OTHER_COLOURS, caption, label_axes, label_ends, panels, paper_style
from qerl_bench.statistics import Mean, crossed
from qerl_bench.study.load import Run
from qerl_bench.study.select import by_setting, cell

PANELS = ("reward/mean", "entropy")
REFILLS = "dynamic/refills"


def by_algorithm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by algorithm, by name. Raises ConfigError if one of them has two runs of a seed."""
    require(bool(runs), "no finished run to compare: pass folders that hold some")
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.option("algo.name"), cell(run))):
        groups.setdefault(run.option("algo.name"), []).append(run)
    for name, group in groups.items():
        units = [cell(run) for run in group]
        require(len(set(units)) == len(units), f"algo={name} has several runs of one seed ({units}): leave some out")
        require(len(by_setting(group)) == 1, f"runs of algo={name} differ in more than the seed: leave some out")
    return groups


def gains(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per algorithm: greedy held-out accuracy before and after training, and the gain with its standard error.

    `gain_se` joins two sources: questions (paired differences, averaged over seeds) and seeds. `gain_z` is their
    quotient, and `worst_z` the smallest quotient of a single seed with its own questions. Entropies are of the first
    and last step.
    """
    return pd.DataFrame([_row(name, group) for name, group in by_algorithm(runs).items()])


def sampled(run: Run) -> pd.Series:
    """Completions sampled up to each step, those of dynamic sampling's refills included."""
    steps = run.series("train", "reward/mean").index
    refills = run.series("train", REFILLS).reindex(steps).fillna(0)
    return (1 + refills).cumsum() * run.option("rollout.prompts_per_step") * run.option("rollout.group_size")


def figure(runs: Sequence[Run], smooth: int) -> Figure:
    """Reward and entropy against completions sampled: mean over seeds, and its 95 % interval, of each algorithm.

    Where a run with dynamic sampling did not keep how often it sampled again, the axis is the step, and the caption
    says which algorithm samples more in it.
    """
    groups = by_algorithm(runs)
    unknown = [
        name
        for name, group in groups.items()
        if any(
            run.option("algo").get("max_resampling_rounds", 0) and run.series("train", REFILLS).empty for run in group
        )
    ]
    with paper_style():
        drawn, axes = panels(1, len(PANELS), 2.0)
        for ax, metric in zip(axes[0], PANELS, strict=True):
            ends = []
            for (name, group), shade in zip(groups.items(), OTHER_COLOURS * len(groups), strict=False):
                values = over_bases(by_cell(group, lambda run, metric=metric: run.series("train", metric)))
                table = moving_average(values, smooth)
                if not unknown:
                    table.index = pd.Index(by_cell(group, sampled).loc[table.index].mean(axis=1) / 1000)
                line = mean_and_band(ax, table, shade, name)
                ends.append((float(table.iloc[-1].mean()), str(line.get_label()), shade))
            _finish(ax, metric, not unknown)
            label_ends(ax, ends)
        caption(drawn, *_notes(groups, smooth, unknown))
    return drawn


def _finish(ax: Axes, metric: str, completions: bool) -> None:
    label_axes(ax, metric)
    ax.set_xlim(left=0)
    if completions:
        ax.set_xlabel("completions sampled, thousands")
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5))


def _notes(groups: dict[str, list[Run]], smooth: int, unknown: Sequence[str]) -> list[str]:
    first = next(iter(groups.values()))
    noise = "without noise" if first[0].option("aqn.name") == "none" else f"with AQN {first[0].option('aqn.name')}"
    counts = {name: repeated(group) for name, group in groups.items()}
    several = len(set(counts.values())) > 1
    said = "; ".join(f"{name}: {count}" for name, count in counts.items()) if several else next(iter(counts.values()))
    band = ", with the 95% interval (Student's t) of each by itself, not of a difference" if len(first) > 1 else ""
    return [
        f"{first[0].option('quant.name').upper()} {noise}. Mean of {said}{band}.",
        f"Mean of {smooth} steps around each." if smooth > 1 else "",
        f"{' and '.join(unknown)} sampled further completions in a step to replace groups of equal rewards; how many "
        "was not kept, so the axis is the step." if unknown else "",
        "The vertical axes do not begin at 0.",
    ]  # fmt: skip


def _row(name: str, group: list[Run]) -> dict[str, Any]:
    changes = np.stack([paired_changes(run) for run in group], axis=1)  # (questions, seeds)
    gain = crossed(changes)
    entropies = [run.series("train", "entropy").to_numpy() for run in group]
    greedy = [run.series("eval", "eval/accuracy_greedy").to_numpy() for run in group]
    sampled_final = [run.series("eval", "eval/accuracy_sampled").to_numpy()[-1] for run in group]
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
        "sampled_final": np.mean(sampled_final),
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
