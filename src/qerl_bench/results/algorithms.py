"""Algorithms side by side: how they learn, and how much better held-out answers got, with an honest standard error.

Runs of one algorithm should differ in their seed alone; the same questions are asked before and after training, so gains
are paired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from qerl_bench.errors import require
from qerl_bench.results.load import Run
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

    `gain_se` joins two sources: questions (paired differences, averaged over seeds) and seeds. `gain_z` is their quotient,
    and `worst_z` the smallest quotient of a single seed with its own questions. Entropies are of the first and last step.
    """
    rows = []
    for name, group in by_algorithm(runs).items():
        changes = pd.concat([_changes(run) for run in group], axis=1)  # (questions, seeds)
        questions = _standard_error(changes.mean(axis=1))
        seeds = _standard_error(changes.mean(axis=0)) if len(group) > 1 else 0.0
        error = math.hypot(questions, seeds)
        gain = float(changes.mean(axis=1).mean())
        entropies = [run.series("train", "entropy") for run in group]
        rows.append(
            {
                "algo": name,
                "seeds": len(group),
                "steps": max(run.last_step for run in group),
                "start": _mean([run.series("eval", "eval/accuracy_greedy").iloc[0] for run in group]),
                "final": _mean([run.series("eval", "eval/accuracy_greedy").iloc[-1] for run in group]),
                "gain": gain,
                "gain_se": error,
                "gain_z": _quotient(gain, error),
                "worst_z": min(_quotient(float(changes[s].mean()), _standard_error(changes[s])) for s in changes),
                "sampled_final": _mean([run.series("eval", "eval/accuracy_sampled").iloc[-1] for run in group]),
                "entropy_first": _mean([series.iloc[0] for series in entropies]),
                "entropy_last": _mean([series.iloc[-1] for series in entropies]),
            }
        )
    return pd.DataFrame(rows)


def figure(runs: Sequence[Run], smooth: int) -> Figure:
    """Reward and entropy by step: mean over seeds, and their range, of each algorithm."""
    groups = by_algorithm(runs)
    with paper_style():
        drawn, axes = panels(1, len(PANELS), 2.1)
        for ax, metric in zip(axes[0], PANELS, strict=True):
            for (name, group), colour in zip(groups.items(), COLOURS * len(groups), strict=False):
                seeds = pd.concat([run.series("train", metric) for run in group], axis=1, join="inner")
                seeds = seeds.rolling(smooth, min_periods=1, center=True).mean()
                mean = seeds.mean(axis=1)
                ax.plot(mean.index, mean, label=name, color=colour, linewidth=1.0)
                if len(group) > 1:
                    ax.fill_between(mean.index, seeds.min(axis=1), seeds.max(axis=1), color=colour, alpha=0.1, linewidth=0)
            label_axes(ax, metric)
        counts = sorted({len(group) for group in groups.values()})
        seeds_shown = f"mean and range of {' or '.join(map(str, counts))} seeds" if counts[-1] > 1 else ""
        legend_above(drawn, axes[0], [seeds_shown, f"smoothed over {smooth} steps" if smooth > 1 else ""])
    return drawn


def _changes(run: Run) -> pd.Series:
    """For each held-out question, correct after training minus correct before, greedy; named after the seed."""
    samples = pd.read_parquet(run.path / "samples.parquet")
    greedy = samples[samples["mode"] == "greedy"].pivot(index="question", columns="step", values="correct").astype(float)
    require(greedy.shape[1] >= 2, f"{run.path} was not evaluated before and after training: run it with eval=task")
    return (greedy[greedy.columns.max()] - greedy[greedy.columns.min()]).rename(run.option("seed"))


def _standard_error(values: pd.Series) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def _quotient(gain: float, error: float) -> float:
    return gain / error if error > 0 else math.nan


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
