"""What claims measure, by the names that their files use, and how a file measures any other training metric."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd

from qerl_core.checks import require
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import (
    ACCURACY,
    Measure,
    RunMetric,
    area,
    curve_of,
    difference,
    first_step,
    held_out,
    last_fifth_mean,
    mean_between,
    mean_gain,
    median_after_warmup,
    peak,
    training_curve,
)

WINDOW = 10  # steps in the mean that must reach a threshold
# What a file says of a training metric: over which steps it is taken.
OVER: dict[str, Callable[[str], RunMetric]] = {
    "first step": first_step,
    "second tenth": lambda metric: mean_between(metric, 0.1, 0.2),
    "last fifth": last_fifth_mean,
    "all": area,
    "gain": mean_gain,
    "median": median_after_warmup,
    "peak": peak,
}


def growth(metric: str) -> RunMetric:
    """The mean over the last fifth of the steps, divided by that over the second tenth."""
    return lambda run: last_fifth_mean(metric)(run) / OVER["second tenth"](metric)(run)


def answered_once(run: Run) -> pd.Series:
    """By held-out question, 1 if any sample answers it: pass@k with k the number of samples."""
    shares = held_out("sampled")(run)
    require(
        isinstance(shares, pd.Series),
        f"{run.name} kept no answers, without which there is no pass@k: leave it out, or run it again",
    )
    assert isinstance(shares, pd.Series)
    return (shares > 0).astype(float)


def steps_saved(run: Run, control: Run) -> float:
    """How many steps earlier than `control` a run reaches 90 % of the reward that `control` gains.

    A run that never reaches it counts as reaching it after the last step, so the difference is at most all steps.
    """
    rewards = training_curve(control, "reward/mean").to_numpy()
    require(len(rewards) >= WINDOW, f"{control.name} has {len(rewards)} steps, steps saved need {WINDOW}: train longer")
    start, end = rewards[:WINDOW].mean(), rewards[-WINDOW:].mean()
    threshold = start + 0.9 * (end - start)
    reached, reached_by_control = (
        min(steps_to_threshold(*curve_of(training_curve(one, "reward/mean")), threshold, WINDOW), control.last_step + 1)
        for one in (run, control)
    )
    return reached_by_control - reached


def steps_to_threshold(steps: np.ndarray, values: np.ndarray, threshold: float, window: int) -> float:
    """The first step at which the mean of the last `window` values reaches `threshold`; infinite if none does."""
    means = np.convolve(values, np.ones(window) / window, mode="valid") if len(values) >= window else np.array([])
    reached = np.flatnonzero(means >= threshold)
    return float(steps[reached[0] + window - 1]) if len(reached) else math.inf


# Margins of these and of ACCURACY are for figures, which are about no single claim; a claim has its own.
INITIAL_ENTROPY = Measure(
    "entropy of the sampler at the first step", first_step("entropy"), ratio=True, margin=math.log(1.02)
)
NOISY_ENTROPY = Measure(
    "entropy of the sampler over the second tenth of the steps", OVER["second tenth"]("entropy"), ratio=True
)
REWARD = Measure("mean reward over the run (area under its curve)", area("reward/mean"), unit="reward", margin=0.02)
LATE_REWARD = Measure(
    "mean reward over the last fifth of the steps", last_fifth_mean("reward/mean"), unit="reward", margin=0.02
)
MEASURES = {
    "initial_entropy": INITIAL_ENTROPY,
    "early_entropy": NOISY_ENTROPY,
    "certain_entropy": Measure(
        "entropy of the four fifths of tokens with least of it at the first step",
        first_step("entropy/rest"),
        ratio=True,
        needs="entropy/rest",
    ),
    "uncertain_entropy": Measure(
        "entropy of the fifth of tokens with most of it at the first step",
        first_step("entropy/top20"),
        ratio=True,
        needs="entropy/top20",
    ),
    "reward": REWARD,
    "early_reward": Measure(
        "mean reward over the second tenth of the steps", OVER["second tenth"]("reward/mean"), unit="reward"
    ),
    "late_reward": LATE_REWARD,
    "accuracy": ACCURACY,
    "pass_at_k": Measure("held-out pass@k, k all samples", answered_once, unit="points", scale=100.0),
    "late_mismatch": Measure(
        "KL between sampler and trainer over the last fifth of the steps", last_fifth_mean("mismatch/kl"), ratio=True
    ),
    "mismatch_growth": Measure(
        "KL between sampler and trainer, last fifth of the steps over their second tenth",
        growth("mismatch/kl"),
        ratio=True,
    ),
    "entropy_growth": Measure(
        "entropy of the sampler, last fifth of the steps over their second tenth", growth("entropy"), ratio=True
    ),
    "rollout_speed": Measure(
        "completion tokens per second", median_after_warmup("speed/rollout_tok_s"), ratio=True, gpu=True
    ),
    "step_time": Measure("seconds per step", median_after_warmup("time/step_s"), ratio=True, gpu=True),
    "peak_memory": Measure("peak memory", peak("memory/peak_gib"), ratio=True, gpu=True, exact=True),
}
# Numbers of a pair of runs, treated and control, that are shown without a verdict.
OF_PAIRS: dict[str, tuple[str, Callable[[Run, Run], float]]] = {
    "gain_above_start": ("difference of the mean reward above the run's start", difference(mean_gain("reward/mean"))),
    "steps_saved": ("steps saved to 90 % of BF16's gain", steps_saved),
}
