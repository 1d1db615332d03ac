"""Algorithms side by side: their learning curves, and their gains of held-out accuracy with standard errors.

The same questions are asked before and after training, so gains are paired. The horizontal axis is the number of
completions sampled, because an algorithm that samples twice as many in a step has twice as much to learn from.
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

from qerl_core.checks import require
from qerl_core.statistics import Estimate
from qerl_studies.effects.estimate import Effect, over_units
from qerl_studies.effects.pairs import average_seeds, by_cell
from qerl_studies.figures.run import mean_and_band, moving_average
from qerl_studies.figures.style import OTHER_COLORS, caption, label_axes, label_ends, panels, paper_style
from qerl_studies.runs.load import Run
from qerl_studies.runs.settings import Setting, Study, describe_repeats, steps_around, unit_count
from qerl_studies.tables.paper import Table

PANELS = ("reward/mean", "entropy")
REFILLS = "dynamic/refills"


def by_algorithm(study: Study) -> dict[str, Setting]:
    """The setting of each algorithm, by name. Raises ConfigError if one has two settings, or two runs of a seed."""
    require(bool(study.runs), "no finished run to compare: pass folders that hold some")
    settings: dict[str, Setting] = {}
    for setting in sorted(study.settings, key=lambda one: one["algo.name"]):
        other = settings.setdefault(setting["algo.name"], setting)
        require(other is setting, f"runs of algo={setting['algo.name']} differ in more than the seed: leave some out")
    return settings


def gain_table(study: Study) -> pd.DataFrame:
    """One row per algorithm: greedy held-out accuracy before and after training, and the gain with its standard error.

    `gain_se` holds for other questions and other seeds. `gain_z` is gain / gain_se; `worst_z` is the smallest such
    quotient of a single seed. Entropies are of the first and last step.
    """
    return pd.DataFrame([_row(name, setting.runs) for name, setting in by_algorithm(study).items()])


def gains(study: Study) -> Table:
    """`gain_table`, shown in per cent, with intervals."""
    table = gain_table(study)
    shown = pd.DataFrame({"algorithm": table["algo"], "seeds": table["seeds"].astype(str)})
    for name, column in (("before", "start"), ("after", "final"), ("after, sampled", "sampled_final")):
        shown[name] = [f"{100 * value:.1f}" for value in table[column]]
    shown["gain"] = [
        f"{100 * gain:+.1f} "
        + (f"[{100 * (gain - half):+.1f}, {100 * (gain + half):+.1f}]" if half > 0 else "no interval")
        for gain, half in zip(table["gain"], table["gain_half"], strict=True)
    ]
    seeds = ", ".join(str(n) for n in sorted(set(table["seeds"])))
    caption = (
        f"Held-out accuracy (%, greedy unless stated) before and after training, n = {seeds} seeds. Brackets: 95 % "
        "interval of the gain, paired by question, over questions and seeds."
    )
    return Table("algorithms", table.drop(columns="gain_half"), shown, caption)


def completions_sampled(run: Run) -> pd.Series:
    """Completions sampled up to each step, including those of dynamic sampling."""
    steps = run.series("train", "reward/mean").index
    refills = run.series("train", REFILLS).reindex(steps).fillna(0)
    return (1 + refills).cumsum() * run.option("rollout.prompts_per_step") * run.option("rollout.group_size")


def algorithm_curves(study: Study, smooth: int) -> Figure:
    """Reward and entropy against completions sampled: the mean of each algorithm over seeds, with its 95 % interval.

    Each step shows the mean of `smooth` steps around it, at most a fifth of the run. If a run with dynamic sampling did
    not record how often it sampled again, the axis is the step, and the caption names the algorithm.
    """
    groups: dict[str, Sequence[Run]] = {name: setting.runs for name, setting in by_algorithm(study).items()}
    unknown = [
        name
        for name, group in groups.items()
        if any(
            run.option("algo").get("max_resampling_rounds", 0) and run.series("train", REFILLS).empty for run in group
        )
    ]
    smooth = steps_around([run for group in groups.values() for run in group], smooth)
    with paper_style():
        figure, axes = panels(1, len(PANELS), 2.0)
        for ax, metric in zip(axes[0], PANELS, strict=True):
            ends = []
            for (name, group), shade in zip(groups.items(), OTHER_COLORS * len(groups), strict=False):
                values = average_seeds(by_cell(group, lambda run, metric=metric: run.series("train", metric)))
                table = moving_average(values, smooth)
                if not unknown:
                    table.index = pd.Index(by_cell(group, completions_sampled).loc[table.index].mean(axis=1) / 1000)
                line = mean_and_band(ax, table, shade, name)
                ends.append((float(table.iloc[-1].mean()), str(line.get_label()), shade))
            _finish(ax, metric, not unknown)
            label_ends(ax, ends)
        caption(figure, *_notes(groups, smooth, unknown))
    return figure


def _finish(ax: Axes, metric: str, completions: bool) -> None:
    label_axes(ax, metric)
    ax.set_xlim(left=0)
    if completions:
        ax.set_xlabel("completions sampled, thousands")
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5))


def _notes(groups: dict[str, Sequence[Run]], smooth: int, unknown: Sequence[str]) -> list[str]:
    first = next(iter(groups.values()))
    noise = "without noise" if first[0].noise == "none" else f"with AQN {first[0].noise}"
    counts = {name: describe_repeats(group) for name, group in groups.items()}
    several = len(set(counts.values())) > 1
    repeats = "; ".join(f"{name}: {text}" for name, text in counts.items()) if several else next(iter(counts.values()))
    interval = ", with the 95% interval (Student's t) of each by itself, not of a difference"
    band = ("", ", and each", interval)[min(unit_count(first), 3) - 1]
    return [
        f"{first[0].option('quant.name').upper()} {noise}. Mean of {repeats}{band}.",
        f"Mean of {smooth} steps around each." if smooth > 1 else "",
        f"{' and '.join(unknown)} sampled further completions in a step to replace groups of equal rewards; how many "
        "was not kept, so the axis is the step." if unknown else "",
        "The vertical axes do not begin at 0.",
    ]  # fmt: skip


def _row(name: str, group: Sequence[Run]) -> dict[str, Any]:
    gain = Effect(tuple(by_cell(group, end) for end in (answers_after, answers_before)))
    entropies = [run.series("train", "entropy").to_numpy() for run in group]
    greedy = [run.series("eval", "eval/accuracy_greedy").to_numpy() for run in group]
    sampled_final = [run.series("eval", "eval/accuracy_sampled").to_numpy()[-1] for run in group]
    return {
        "algo": name,
        "seeds": len(group),
        "steps": max(run.last_step for run in group),
        "start": np.mean([values[0] for values in greedy]),
        "final": np.mean([values[-1] for values in greedy]),
        "gain": gain.whole.value,
        "gain_se": gain.whole.stderr,
        "gain_half": gain.whole.half_width,  # of the 95 % interval
        "gain_z": _quotient(gain.whole),
        "worst_z": min(_quotient(over_units(seed[:, None], "drawn")) for seed in gain.differences.to_numpy().T),
        "sampled_final": np.mean(sampled_final),
        "entropy_first": np.mean([values[0] for values in entropies]),
        "entropy_last": np.mean([values[-1] for values in entropies]),
    }


def answers_after(run: Run) -> pd.Series:
    """The share of right greedy answers to each held-out question after training."""
    return _answers(run).iloc[:, -1]


def answers_before(run: Run) -> pd.Series:
    return _answers(run).iloc[:, 0]


def _answers(run: Run) -> pd.DataFrame:
    answers = run.answers("greedy")
    require(answers.shape[1] > 1, f"{run.path} was not evaluated before and after training: run it with eval=task")
    return answers


def _quotient(gain: Estimate) -> float:
    """Gain over its standard error; 0 if nothing changed, infinite if all questions changed alike."""
    if gain.stderr > 0:
        return gain.value / gain.stderr
    return math.copysign(math.inf, gain.value) if gain.value != 0 else 0.0
