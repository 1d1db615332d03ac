"""Statistics of several runs of several tasks, which have no interval but by drawing runs anew: interquartile means,
probability of improvement, performance profiles.

After Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice". What draws random
numbers takes a generator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from qerl_core.statistics import CONFIDENCE


@dataclass(frozen=True)
class Resampled:
    """A statistic of the data and its percentile interval over resamples; arrays if the statistic is one."""

    value: Any
    low: Any
    high: Any


def interquartile_mean(scores: np.ndarray) -> float:
    """Mean of the middle half of all scores, whatever their shape."""
    from scipy import stats

    return float(stats.trim_mean(scores.ravel(), 0.25))


def stratified_bootstrap(
    scores: np.ndarray, statistic: Callable[[np.ndarray], Any], generator: np.random.Generator, draws: int = 2000
) -> Resampled:
    """95 % interval of `statistic(scores)`; `scores` is (runs, tasks), and runs are drawn anew within each task.

    For a paired comparison pass differences, so that runs stay in their pairs.
    """
    resampled = [
        statistic(np.take_along_axis(scores, generator.integers(len(scores), size=scores.shape), axis=0))
        for _ in range(draws)
    ]
    low, high = np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    return Resampled(statistic(scores), low, high)


def probability_of_improvement(differences: np.ndarray) -> float:
    """Probability that a paired difference is above 0, ties counting half."""
    return float((np.sign(differences) / 2 + 0.5).mean())


def performance_profile(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Share of all runs and tasks with a score above each threshold: (thresholds,), falling from 1 to 0."""
    return (scores.reshape(-1, 1) > thresholds).mean(0)
