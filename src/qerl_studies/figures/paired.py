"""The comparison that figures draw: a number of a run minus that of its control with the same base model and seed.

Such runs share prompts and random numbers, whose influence cancels. The interval is that of claims: Student's t over
base models if there are several (seeds of a base are averaged first), otherwise over the seeds of the one base, and of
answers for other questions too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pandas as pd

from qerl_core.statistics import Estimate
from qerl_studies.claims.measures import ACCURACY, INITIAL_ENTROPY, LATE_REWARD, REWARD
from qerl_studies.effects.estimate import Effect, effect_of
from qerl_studies.effects.pairs import mean_of_runs
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import Measure, area, final_answers
from qerl_studies.runs.settings import describe_repeats

REWARD_MEAN = replace(REWARD, name="mean reward", unit="")
REWARD_LATE = replace(LATE_REWARD, name="late reward", unit="")
ENTROPY = replace(INITIAL_ENTROPY, name="mean entropy", metric=area("entropy"), level_format="{:.4f}")
SAMPLED, GREEDY = (
    replace(ACCURACY, name=f"held-out ({mode})", metric=final_answers(mode), level_format="{:.1%}")
    for mode in ("sampled", "greedy")
)


def effect(treated: Sequence[Run], control: Sequence[Run], measure: Measure) -> Effect:
    return effect_of([treated, control], measure.averaged if measure.ratio else measure.metric)


def level(runs: Sequence[Run], measure: Measure) -> float:
    """The mean of an arm; the geometric mean for ratios."""
    mean = mean_of_runs(runs, measure.averaged)
    return math.exp(mean) if measure.ratio else mean


def effect_text(measure: Measure, estimate: Estimate) -> list[str]:
    """The effect and its interval, as text in two parts."""
    digits = 3 if measure.scale == 1 and not measure.ratio else 1
    ends = (estimate.low, estimate.value, estimate.high)
    low, middle, high = (f"{measure.on_axis(x):+.{digits}f}".replace("-", "\N{MINUS SIGN}") for x in ends)
    return [middle, f"[{low}, {high}]" if estimate.n > 1 else "one seed"]


def interval_note(runs: Sequence[Run], measures: Sequence[Measure] = ()) -> str:
    """The sentence of a caption that explains points and intervals, and which questions those of answers are about."""
    if len(runs) == 1:
        return "A single seed, so there is no interval."
    small = "Small points: " + ("base models." if len({run.base for run in runs}) > 1 else "seeds.")
    told = next((f", {questions_of(runs[0], one)}" for one in measures if one.answers), "")
    return f"Mean and 95% interval (Student's t{told}) of paired differences over {describe_repeats(runs)}. {small}"


def questions_of(run: Run, measure: Measure) -> str:
    """Whether an interval of answers holds for other questions too, for which they have to be kept."""
    return f"questions {'drawn' if isinstance(measure.metric(run), pd.Series) else 'fixed'}"


def correlation_note(effects: Iterable[Effect]) -> str:
    """The sentence of a caption that says how far the two arms of each go together, from least to most."""
    known = sorted(one.correlation for one in effects if not math.isnan(one.correlation))
    ends = dict.fromkeys(f"{end:+.2f}" for end in (known[:1] + known[-1:]))
    return f"Arms correlate {' to '.join(ends)}." if known else ""


def workload(run: Run) -> str:
    """The sentence of a caption that describes the steps that were timed."""
    model, rollout = run.option("model.name"), run.config.get("rollout", {})
    weights = ", random weights" if "shape" in model else ""
    size = rollout.get("prompts_per_step", 0) * rollout.get("group_size", 0)
    completions = f", {size} completions a step" if size else ""
    task = run.config.get("task", {})
    tokens = f" of {task['completion_tokens']} tokens" if completions and "completion_tokens" in task else ""
    done = f"{model}{weights}{completions}{tokens}, on {run.device}"
    return f"{done}. Medians of the steps that trained, after the first tenth; peak of all that trained."
