"""What is compared between runs: one number of a run, or one for each held-out question."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from qerl_core.checks import require
from qerl_core.statistics import Estimate
from qerl_studies.runs.load import Run

TRAINED_SHARE = "train/taught_frac"  # share of a step's completion tokens with a gradient
WARM_UP = 0.1  # share of a run's steps, at its start, that timings leave out
LATE_ANSWERS = 0.25  # share of a run's steps whose evaluations are late ones
LATE = 0.2  # share of a run's steps that count as its end
START_STEPS = 5  # that count as the start of a curve

RunMetric = Callable[[Run], float]


@dataclass(frozen=True)
class Measure:
    """`metric` gives the number of a run, or a Series of numbers by question.

    With `ratio`, numbers are positive, arms are compared by quotient, and logarithms are averaged. `margin` is the
    smallest difference that matters, in units of the metric (of its logarithm with `ratio`); 0 if no claim is about it.
    With `gpu`, runs on a CPU do not count, and without the training metric `needs` no run does. An `exact` number may
    be the same for all seeds, which is then no sign of copied runs. `scale` and `unit` are for readers: a difference is
    multiplied by one and followed by the other.
    """

    name: str
    metric: Callable[[Run], float | pd.Series]
    unit: str = ""
    scale: float = 1.0
    ratio: bool = False
    margin: float = 0.0
    gpu: bool = False
    needs: str = ""
    exact: bool = False
    answers: str = ""
    asked: bool = False
    level_format: str = "{:.3f}"  # of an arm's own mean in a figure

    def counts(self, run: Run) -> bool:
        """Whether the run can have this number."""
        placed = not self.gpu or run.environment.get("device") == "cuda"
        asked = not self.asked or run.records("eval", f"eval/accuracy_{self.answers}")
        return placed and asked and (not self.needs or run.records("train", self.needs))

    @property
    def greedy(self) -> Measure | None:
        """The same accuracy of greedy answers; None for what is no accuracy of sampled ones."""
        if self.answers != "sampled":
            return None
        name = self.name.replace("sampled", "greedy")
        return replace(self, name=name, metric=held_out("greedy"), answers="greedy", asked=True)

    @property
    def excuse(self) -> str:
        """Why runs for which `counts` is false do not count."""
        if self.asked:
            return f"they have no {self.answers} answers"
        return f"they did not record {self.needs}" if self.needs else "they ran on a CPU and cannot speak for a GPU"

    def number(self, run: Run) -> float:
        """The one number of a run: of one for each question their mean."""
        return float(np.mean(self.metric(run)))

    def averaged(self, run: Run) -> float:
        """The number of a run as it is averaged: its logarithm with `ratio`."""
        value = self.number(run)
        require(not self.ratio or value > 0, f"{run.name} has {self.name} {value:g}, which has no ratio")
        return math.log(value) if self.ratio else value

    def on_axis(self, effect: float) -> float:
        """An effect in the unit of a figure's axis; in per cent for ratios."""
        return 100 * math.expm1(effect) if self.ratio else self.scale * effect

    def ends_on_axis(self, estimate: Estimate) -> tuple[float, float, float]:
        """Value and interval in the unit of a figure's axis."""
        return self.on_axis(estimate.value), self.on_axis(estimate.low), self.on_axis(estimate.high)

    @property
    def band(self) -> tuple[float, float]:
        """The margin on a figure's axis."""
        return self.on_axis(-self.margin), self.on_axis(self.margin)

    def text(self, effect: float) -> str:
        """An effect or margin, with its sign."""
        return f"×{math.exp(effect):.3f}" if self.ratio else f"{self.scale * effect:+.{2 if self.scale > 1 else 4}f}"

    def level_text(self, mean: float) -> str:
        """The mean of one arm."""
        return f"{math.exp(mean) if self.ratio else self.scale * mean:.4g}"

    def estimate_text(self, estimate: Estimate) -> str:
        """Effect and interval; a single seed has none, because its interval knows nothing of other seeds."""
        if estimate.has_interval and estimate.n > 1:
            return f"{self.with_interval(estimate)} {self.unit}".strip()
        return f"{self.text(estimate.value)} {self.unit}".strip() + f" ({estimate.alike})"

    def with_interval(self, estimate: Estimate) -> str:
        """Without a unit; the value alone where nothing varied."""
        return estimate.text(self.text)

    def interval_text(self, low: float, high: float) -> str:
        return f"[{self.text(low)}, {self.text(high)}]"

    def size_text(self, effect: float) -> str:
        """An effect without a direction, such as a margin."""
        size = f"{self.text(effect).removeprefix('+')} {self.unit}".strip()
        return f"{100 * math.expm1(effect):.1f} %" if self.ratio else size


def training_curve(run: Run, metric: str) -> pd.Series:
    """A training metric by step. Raises ConfigError if the run wrote no number of it from step 1 on."""
    values = run.series("train", metric)
    require(bool(values.loc[1:].notna().any()), f"{run.name} has no number of the metric {metric}")
    return values


def first_step(metric: str) -> RunMetric:
    """The value at the first step, of the policy before any training."""
    return lambda run: float(training_curve(run, metric).dropna().iloc[0])


def area(metric: str) -> RunMetric:
    """The mean height of the curve; it is larger for a run that rises earlier to the same end."""
    return lambda run: area_under_curve(*curve_of(training_curve(run, metric)))


def mean_gain(metric: str) -> RunMetric:
    """The mean height of the curve above the mean of its first steps."""
    return lambda run: area(metric)(run) - float(np.nanmean(training_curve(run, metric).iloc[:START_STEPS]))


def last_fifth_mean(metric: str) -> RunMetric:
    """The mean over the last fifth of the steps."""

    return lambda run: mean_of_last_fifth(training_curve(run, metric).to_numpy())


def mean_of_last_fifth(values: np.ndarray) -> float:
    """Of the numbers of all steps."""
    return float(np.nanmean(values[-max(1, round(LATE * len(values))) :]))


def mean_between(metric: str, start: float, end: float) -> RunMetric:
    """The mean over the steps between two shares of the run; 0.1 and 0.2 give its second tenth."""

    def of_run(run: Run) -> float:
        values = training_curve(run, metric)
        return float(np.nanmean(values.iloc[math.floor(start * len(values)) : max(1, math.floor(end * len(values)))]))

    return of_run


def median_after_warmup(metric: str) -> RunMetric:
    """The median of `warm_steps`."""
    return lambda run: float(warm_steps(run, metric).median())


def warm_steps(run: Run, metric: str) -> pd.Series:
    """The values in the steps with a gradient, without the first tenth of the run."""
    steps = run.series("train", metric).index
    kept = _trained_steps(run, metric).drop(steps[: math.ceil(WARM_UP * len(steps))], errors="ignore")
    require(not kept.empty, f"{run.name} has no step with a gradient after its first tenth")
    return kept


def peak(metric: str) -> RunMetric:
    """The maximum over the steps with a gradient."""
    return lambda run: float(_trained_steps(run, metric).max())


def _trained_steps(run: Run, metric: str) -> pd.Series:
    """The steps with a gradient: speed and memory of the others are not those of training.

    Raises ConfigError for a run without any, and for one that did not record which steps have one.
    """
    values, share = training_curve(run, metric), run.series("train", TRAINED_SHARE)
    require(not share.empty, f"{run.name} does not record {TRAINED_SHARE}, so its steps may not have trained anything")
    require(
        bool((share > 0).any()),
        f"{run.name} trained nothing: {TRAINED_SHARE} is 0 in every step, because all rewards of a group were equal",
    )
    return values.loc[(share.reindex(values.index) > 0).to_numpy()]


def held_out(mode: str) -> Callable[[Run], float | pd.Series]:
    """Share of correct answers to each held-out question after training; over all questions, for a committed study that
    kept no answers. Raises ConfigError without that evaluation."""

    def of_run(run: Run) -> float | pd.Series:
        last, kept = run.option("steps"), run.kept_answers is not None or run.path.is_dir()
        found = run.answers(mode) if kept else run.series("eval", f"eval/accuracy_{mode}").to_frame().T
        require(last in found and last > 0, f"{run.name} was not evaluated after its last step; 0 is before training")
        return found.loc[:, last] if kept else float(found[last].iloc[0])

    return of_run


def gained(mode: str) -> Callable[[Run], pd.Series]:
    """How much more often each held-out question is answered after training than before it."""

    def of_run(run: Run) -> pd.Series:
        answers, last = run.answers(mode), run.option("steps")
        require({0, last} <= {*answers}, f"{run.name} was not evaluated before its first and after its last step")
        return answers.loc[:, last] - answers.loc[:, 0]

    return of_run


def late_mean(mode: str, column: str = "correct") -> Callable[[Run], pd.Series]:
    """Share of correct answers to each held-out question, a mean of all evaluations in the last quarter of the run.

    `column` is that of `Run.answers`, such as lenient.
    """

    def of_run(run: Run) -> pd.Series:
        answers, last = run.answers(mode, column), run.option("steps")
        late = [step for step in answers if step > (1 - LATE_ANSWERS) * last]
        require(len(late) > 1, f"{run.name} was evaluated {len(late)} times in the last quarter of its steps")
        return answers[late].mean(axis=1)

    return of_run


def final_accuracy(mode: str) -> RunMetric:
    """Held-out accuracy at the last evaluation after step 0. Raises ConfigError for a run without one."""

    def of_run(run: Run) -> float:
        accuracy = run.series("eval", f"eval/accuracy_{mode}")
        accuracy = accuracy.loc[accuracy.index > 0].dropna()
        require(
            not accuracy.empty, f"{run.name} was not evaluated after training: run it with eval=task, or leave it out"
        )
        return float(accuracy.iloc[-1])

    return of_run


def difference(metric: RunMetric) -> Callable[[Run, Run], float]:
    return lambda run, control: metric(run) - metric(control)


def curve_of(series: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    return series.index.to_numpy(), series.to_numpy()


ACCURACY = Measure(
    "held-out accuracy after training, sampled",
    held_out("sampled"),
    unit="points",
    scale=100.0,
    margin=0.01,
    answers="sampled",
)


def final_answers(mode: str) -> Callable[[Run], float | pd.Series]:
    """By held-out question what `final_accuracy` is the mean of; that mean where answers were not kept."""

    def of_run(run: Run) -> float | pd.Series:
        mean = final_accuracy(mode)(run)
        kept = run.kept_answers is not None or (run.path / "samples.parquet").is_file()
        return run.answers(mode).iloc[:, -1] if kept else mean

    return of_run


def area_under_curve(steps: np.ndarray, values: np.ndarray) -> float:
    """Mean height of a curve over its steps (trapezoids), in units of its values; NaN points are left out."""
    known = ~np.isnan(values)
    steps, values = steps[known], values[known]
    require(len(steps) > 0, "the area under a curve needs at least one number")
    return float(np.trapezoid(values, steps) / (steps[-1] - steps[0])) if len(steps) > 1 else float(values[0])
