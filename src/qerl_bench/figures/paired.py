"""The one comparison that figures draw: a number of a run minus that of its control, of the same base model and seed.

Such runs share prompts and random numbers, so what these do to both cancels. The interval is Student's t over base
models where there are several (seeds of a base are averaged first), else over the seeds of the one base.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from qerl_bench.checks import require
from qerl_bench.claims.measure import Measure, area, late
from qerl_bench.claims.paper import ACCURACY, CLAIMS, INITIAL_ENTROPY, LATE_REWARD, REWARD
from qerl_bench.statistics import Mean, interval
from qerl_bench.study.load import Run
from qerl_bench.study.select import cell

Number = Callable[[Run], float]


@dataclass(frozen=True)
class Column:
    """One panel: the number of a run that it shows, and how a difference of it and an arm's own level are written.

    With `ratio` numbers are positive, the mean of logarithms is taken, and a difference is shown in per cent. `margin`
    is the smallest difference that would matter, in units of `of` (of its logarithm with `ratio`); 0 without a claim.
    """

    label: str
    of: Number
    unit: str = ""
    scale: float = 1.0
    ratio: bool = False
    margin: float = 0.0
    level: str = "{:.3f}"

    def shown(self, difference: float) -> float:
        """A difference in the unit in which it is drawn."""
        return 100 * math.expm1(difference) if self.ratio else self.scale * difference

    def text(self, mean: Mean) -> list[str]:
        """Effect and interval, in two parts."""
        digits = 3 if self.scale == 1 and not self.ratio else 1
        ends = (mean.low, mean.mean, mean.high)
        low, middle, high = (f"{self.shown(x):+.{digits}f}".replace("-", "\N{MINUS SIGN}") for x in ends)
        return [middle, f"[{low}, {high}]" if mean.n > 1 else "one seed"]

    def number(self, run: Run) -> float:
        value = self.of(run)
        require(not self.ratio or value > 0, f"{run.name} has {self.label} {value:g}, of which no ratio can be taken")
        return math.log(value) if self.ratio else value


def by_cell(runs: Sequence[Run], of: Callable[[Run], pd.Series | float]) -> pd.DataFrame:
    """What `of` gives, a column per unit (base, seed); a number is a single row, and steps are those that all have."""
    found = {cell(run): of(run) for run in runs}
    series = [value if isinstance(value, pd.Series) else pd.Series([value]) for value in found.values()]
    table = pd.concat(series, axis=1, join="inner")
    table.columns = pd.MultiIndex.from_tuples(found, names=["base", "seed"])
    return table


def over_bases(table: pd.DataFrame) -> pd.DataFrame:
    """One column per base, the mean over its seeds; with a single base one per seed."""
    bases = table.columns.get_level_values("base").unique()
    if len(bases) == 1:
        return table
    return pd.DataFrame({base: table.xs(base, axis="columns", level="base").mean(axis="columns") for base in bases})


def differences(treated: Sequence[Run], control: Sequence[Run], of: Callable[[Run], pd.Series | float]) -> pd.DataFrame:
    """`of` each treated run minus that of its control: a column per base, or per seed of the only base.

    Raises ConfigError with what is missing unless every treated run has a control, and the other way round.
    """
    units = [{cell(run) for run in arm} for arm in (treated, control)]
    alone = sorted(units[0] ^ units[1])
    require(
        not alone, f"{treated[0].name} and {control[0].name} are not of the same bases and seeds: one alone has {alone}"
    )
    for run, other in zip(sorted(treated, key=cell), sorted(control, key=cell), strict=True):
        require(
            run.block == other.block,
            f"{run.name} and {other.name} ran on different machines or versions ({run.block}; {other.block}), so they "
            "may differ in more than what is asked: run both on one",
        )
    first, second = by_cell(treated, of), by_cell(control, of)
    common = first.index.intersection(second.index)
    return over_bases(first.loc[common] - second.loc[common])


def effect(treated: Sequence[Run], control: Sequence[Run], column: Column) -> tuple[Mean, np.ndarray]:
    """Mean difference with its interval, and the differences that it is the mean of."""
    points = differences(treated, control, column.number).to_numpy()[0]
    return interval(points), points


def level(runs: Sequence[Run], column: Column) -> str:
    """An arm's own mean, as text."""
    mean = float(over_bases(by_cell(runs, column.number)).to_numpy().mean())
    return column.level.format(math.exp(mean) if column.ratio else mean)


def repeated(runs: Sequence[Run]) -> str:
    """How often a setting was repeated, and what an interval over that is called."""
    units = [cell(run) for run in runs]
    bases, seeds = len({base for base, _ in units}), len({seed for _, seed in units})
    if bases > 1:
        return f"{bases} base models, {f'the mean of {seeds} seeds' if seeds > 1 else 'one seed'} each"
    return f"{seeds} seeds of one base model" if seeds > 1 else "a single seed"


def interval_note(runs: Sequence[Run]) -> str:
    """The sentence that says what points and intervals are."""
    if len(runs) == 1:
        return "A single seed, so there is no interval."
    small = "Small points: " + ("base models." if len({cell(run)[0] for run in runs}) > 1 else "seeds.")
    return f"Mean and 95% interval (Student's t) of paired differences over {repeated(runs)}. {small}"


def final(decoding: str) -> Number:
    """Held-out accuracy after training. The function raises ConfigError for a run that was not evaluated then."""

    def of(run: Run) -> float:
        found = run.series("eval", f"eval/accuracy_{decoding}")
        found = found.loc[found.index > 0].dropna()
        require(not found.empty, f"{run.name} was not evaluated after training: run it with eval=task, or leave it out")
        return float(found.iloc[-1])

    return of


def margin_of(measure: Measure) -> float:
    """The margin of the claims that are judged by `measure`."""
    (margin,) = {claim.margin for claim in CLAIMS if claim.measure is measure}
    return margin


REWARD_MEAN = Column("mean reward", area("reward/mean"), margin=margin_of(REWARD))
REWARD_LATE = Column("late reward", late("reward/mean"), margin=margin_of(LATE_REWARD))
ENTROPY = Column("mean entropy", area("entropy"), ratio=True, margin=margin_of(INITIAL_ENTROPY), level="{:.4f}")
SAMPLED, GREEDY = (
    Column(f"held-out ({how})", final(how), "points", 100.0, margin=margin_of(ACCURACY), level="{:.1%}")
    for how in ("sampled", "greedy")
)


def workload(run: Run) -> str:
    """What a run that is timed did in a step, as a sentence."""
    model, rollout = run.option("model.name"), run.config.get("rollout", {})
    weights = ", random weights" if "shape" in model else ""
    size = rollout.get("prompts", 0) * rollout.get("group_size", 0)
    completions = f", {size} completions a step" if size else ""
    task = run.config.get("task", {})
    tokens = f" of {task['completion_tokens']} tokens" if completions and "completion_tokens" in task else ""
    done = f"{model}{weights}{completions}{tokens}, on {run.device}"
    return f"{done}. Medians of the steps that trained, after the first tenth; peak of all that trained."
