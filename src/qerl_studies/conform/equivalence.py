"""Whether an arm conforms: two one-sided tests that it ends within the tolerance of its BF16 counterpart.

*pass*: in every measure that is asked, the 95 % interval of the difference lies within the tolerance (two one-sided
tests at 2.5 %, as for *negligible*; no correction, since all must hold). *fail*: in some measure the difference is
shown to be larger than the tolerance (two-sided, 5 % over all measures that are asked). *too few*: neither is shown.

Units are bases, or the seeds of one base, in pairs that ran on one machine. The counterpart is of the same study: a run
on another machine differs by more than its format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qerl_core.checks import ConfigError, require
from qerl_core.options.fingerprint import ADDED_LATER
from qerl_core.statistics import Estimate
from qerl_studies.claims.match import Contrast, Filter, Side, Stratum, match
from qerl_studies.conform.reference import MEASURES, Bf16Reference
from qerl_studies.effects.estimate import Effect, effect_of
from qerl_studies.effects.pairs import by_cell
from qerl_studies.runs.environments import is_reported
from qerl_studies.runs.load import Cell, Run
from qerl_studies.runs.measure import Measure

WITHIN, OUTSIDE = 0.025, 0.05  # levels: one-sided of each of the two tests, two-sided
POWER = 0.9  # of each one-sided test, so that both hold in at least 80 % of studies whose true difference is 0
FACTOR = (  # keys in which an arm may differ from its BF16 counterpart: how numbers are stored, noise, and its remedy
    *("quant.", "quantizer.", "aqn.", "noise.", "importance_sampling."),
    *("rollout.quant", "rollout.activations", "rollout.merge", "train.merge", "train.gradients", "eval.quant", "arm."),
)
PLACES = ("model.", "task.", "device", "class")  # whether these agree with the reference is asked otherwise


@dataclass(frozen=True)
class AskedMeasure:
    """One measure of one arm: the difference from BF16, or why there is none, and the means of both."""

    measure: Measure
    tolerance: float
    decides: bool
    effect: Estimate | None = None
    reason: str = ""
    levels: tuple[float, ...] = ()

    @property
    def within(self) -> bool:
        return self.effect is not None and self.effect.p_within(self.tolerance) <= WITHIN

    def outside(self, measures: int) -> bool:
        """Shown to be beyond the tolerance, corrected for so many measures."""
        return self.effect is not None and self.effect.p_outside(self.tolerance) * measures <= OUTSIDE

    @property
    def needed(self) -> int | None:
        """Units with which an arm without any difference would pass four times of five; None if no number is enough."""
        return self.effect.repetitions_needed(self.tolerance, WITHIN, POWER) if self.effect else None


@dataclass(frozen=True)
class Conformity:
    """What is said of one arm. `arm` names in what it differs from BF16."""

    arm: str
    asked: tuple[AskedMeasure, ...]
    left_out: str
    setting: tuple[str, ...]  # config keys in which its BF16 counterpart is not the reference

    @property
    def word(self) -> str:
        deciding = [one for one in self.asked if one.decides]
        if self.setting or any(one.effect is None for one in deciding):
            return "not tested"
        if any(one.outside(len(deciding)) for one in deciding):
            return "fail"
        return "pass" if all(one.within for one in deciding) else "too few"

    @property
    def reason(self) -> str:
        if self.setting:
            return f"its BF16 runs have another setting than the reference: {', '.join(self.setting[:6])}"
        return "; ".join(dict.fromkeys(one.reason for one in self.asked if one.decides and one.reason))


def conformity(
    reference: Bf16Reference, runs: Sequence[Run], measures: Sequence[str] = (), control: str | None = None
) -> list[Conformity]:
    """What is said of each arm of `runs`. `measures` are asked in the place of the reference's own; `control` is the
    name of the BF16 arm of a reported study. Raises ConfigError without runs of the model and task, and without BF16.
    """
    asked = tuple(measures) or reference.asked
    unknown = [name for name in asked if name not in reference.tolerances]
    known = ", ".join(reference.tolerances)
    require(not unknown, f"{reference.name} has no tolerance of {', '.join(unknown)}: it has {known}")
    places = {(run.option("model.name"), run.option("task.name")) for run in reference.runs}
    here = [run for run in runs if run.finished and (run.option("model.name"), run.option("task.name")) in places]
    listed = " or ".join(f"{model} on {task}" for model, task in sorted(places))
    require(bool(here), f"no finished run of {listed}, which {reference.name} is about")
    others = [run for run in here if is_reported(run.environment)]
    require(not others or control is not None, "reported runs: name the arm that is BF16 with control=ARM")
    arm = (Filter("arm.name", (control,)),) if others else reference.arm
    contrast = Contrast("format - bf16", FACTOR, (Side("format", 1, ()), Side("bf16", -1, arm)))
    names = [*asked, *(name for name in reference.tolerances if name not in asked)]
    strata = [one for one in match(contrast, (), others or here) if one.variants[0] != one.variants[1]]
    require(bool(strata), "no arm has BF16 runs beside it that differ from it in their format alone")
    return [
        Conformity(
            _name(stratum),
            tuple(_asked(MEASURES[name], reference.tolerances[name], name in asked, stratum) for name in names),
            _left_out(stratum),
            _otherwise(reference, stratum),
        )
        for stratum in strata
    ]


def _asked(measure: Measure, tolerance: float, decides: bool, stratum: Stratum) -> AskedMeasure:
    """The difference over the pairs that both arms have, each on one machine."""
    kept = [cell for cell in _common(stratum) if len({arm[cell].block for arm in stratum.arms}) == 1]
    arms = [{cell: arm[cell] for cell in kept} for arm in stratum.arms]
    if not kept:
        return AskedMeasure(measure, tolerance, decides, reason="no pair of runs on one machine")
    try:
        found = effect_of(arms, measure.metric)
    except ConfigError as error:
        return AskedMeasure(measure, tolerance, decides, reason=str(error))
    effect, levels = found.whole, found.levels
    if not (effect.n > 1 and effect.has_interval):
        why = "a single pair decides nothing" if effect.n < 2 else "the same difference in all pairs: copies of a run?"
        return AskedMeasure(measure, tolerance, decides, reason=why, levels=levels)
    return AskedMeasure(measure, tolerance, decides, effect, "", levels)


def _common(stratum: Stratum) -> list[Cell]:
    first, second = stratum.arms
    return sorted(first.keys() & second.keys())


def _left_out(stratum: Stratum) -> str:
    """How many runs have no part in the difference, and why; empty if all have one."""
    common = _common(stratum)
    alone = len(stratum.cells) - len(common)
    apart = sum(len({arm[cell].block for arm in stratum.arms}) > 1 for cell in common)
    parts = [f"{alone} without a counterpart"] * bool(alone) + [f"{apart} pairs on two machines"] * bool(apart)
    return ", ".join(parts)


def _name(stratum: Stratum) -> str:
    """In what the arm differs from BF16: the names of its options, and else the keys."""
    first, second = stratum.variants
    keys = sorted(key for key in {**first, **second} if first.get(key) != second.get(key) and "_target_" not in key)
    names = [key for key in keys if key.endswith(".name")]
    inside = tuple(name.removesuffix("name") for name in names)
    others = [key for key in keys if key in ADDED_LATER or not key.startswith(inside)] if inside else keys
    groups = {name.removesuffix(".name") for name in names}
    kept = [key for key in others if not ("aqn" in groups and key.startswith("noise."))]
    return ", ".join(f"{key.removesuffix('.name')} {first.get(key)}" for key in [*names, *kept])


def _otherwise(reference: Bf16Reference, stratum: Stratum) -> tuple[str, ...]:
    """The keys in which the BF16 runs beside an arm have other values than the reference; none for a reported one,
    whose options are not known by our names."""
    control = next(iter(stratum.arms[1].values()))
    if is_reported(control.environment):
        return ()
    here, there = control.config_items, reference.runs[0].config_items
    keys = sorted(key for key in {**here, **there} if here.get(key) != there.get(key) and not key.startswith(PLACES))
    return tuple(f"{key} {here.get(key)} ({there.get(key)})" for key in keys)


def place_of_control(reference: Bf16Reference, measure: str, mean: float) -> str:
    """Where the mean of BF16 lies beside the reference's, in words: over how many copies, and the interval for one."""
    level = Effect((by_cell(reference.runs, MEASURES[measure].metric),), (1,))
    bases = level.by_base
    if level.prediction is None:
        return f"{len(bases)} reference bases, too few to say where one more is to be expected"
    low, high = level.prediction
    shown = MEASURES[measure].level_text
    inside = "inside" if low <= mean <= high else "OUTSIDE"
    return f"{shown(mean)}, {inside} of {shown(low)} to {shown(high)}, where one more of {len(bases)} bases is expected"
