"""The gates of a study: what its bases and first runs must show before the other arms can decide anything.

A gate looks at the reference, at a control, or at what a treatment acts on directly, never at the effect that the study
is about. Intervals are over bases, 95 %; of a design with one model those of training are over seeds. A limit inside of
the interval is neither passed nor failed. What a weight format costs a base is measured and stops nothing: claims about
formats are about that very cost.

Controls are of two kinds. Without a gain that the world can show no noise can be judged; without exploration that pays,
noise can be said to harm, not to fail to help.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

import numpy as np

from qerl_bench.statistics import mean_ci, pass_at_k
from qerl_bench.studies.design.controls import EFFECT, level, one_passes
from qerl_bench.studies.design.design import Arm, Design
from qerl_bench.studies.runs.load import Run
from qerl_bench.studies.runs.measure import LATE, held_out
from qerl_bench.studies.tables.markdown import markdown_table

PASS_AT_1 = (0.10, 0.40)
PASS_AT_K = 0.80  # of as many samples as the probe draws, 64 in a study
NO_SUCCESS = (0.20, 0.50)  # groups in which no completion is right
RISE = (0.05, 0.15)  # of the entropy, by matched noise
KL = (0.01, 0.10)  # nats a token between the sampler with matched noise and the trainer
HEADROOM = 0.15  # between the reference's end and the ceiling, which is 1: every problem has an answer
SKILL = 0.05  # that the reference gains on the longest questions
LONGEST = 0.25  # the share of the held-out questions that count as the longest, at least

Probe = Mapping[str, Any]
Runs = Mapping[tuple[str, int, int], Run]  # by arm, base and seed


Word = Literal["yes", "no", "neither", "open", "measured", "no such arm"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured for one gate, and what that says of its limit.

    A failed gate stops the arms `stops`, and so does one that `must` be passed and is neither, unless `overridden`.
    `meeting` of `bases` meet the limit by themselves. A mean can be where no base is.
    """

    gate: str
    limit: str
    word: Word
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    bases: int = 0
    meeting: int = 0
    stops: tuple[str, ...] = ()
    must: bool = False
    overridden: bool = False

    @property
    def passed(self) -> bool | None:
        return {"yes": True, "no": False}.get(self.word)

    @property
    def fails(self) -> bool:
        return self.word == "no" or (self.must and self.word == "neither")


def gates(design: Design, probes: Sequence[Probe], runs: Runs) -> list[Result]:
    """The results of all gates of a study, those of its bases first."""
    everything = tuple(arm.name for arm in design.arms)
    reference = design.format_of(design.reference)
    samples, group = design.probe.samples, design.samples_per_group
    results = [
        between("pass@1 of the base", *PASS_AT_1, [pass_at(one, reference, 1) for one in probes], everything),
        between(f"pass@{samples}", PASS_AT_K, 1.0, [pass_at(one, reference, samples) for one in probes], everything),
        between(
            f"groups of {group} without success",
            *NO_SUCCESS,
            [1 - pass_at(one, reference, group) for one in probes],
            everything,
        ),
    ]
    for quant in design.formats[1:]:
        lost = [pass_at(one, reference, 1) - pass_at(one, quant, 1) for one in probes if quant in one["formats"]]
        results.append(Result(gate=f"damage by {quant}", limit="none", word="measured", **_numbers(lost)))
    for arm in (arm for arm in design.arms if arm.dosed):
        found = [one["doses"][arm.name] for one in probes if arm.name in one["doses"]]
        for name, limits in (("rise", RISE), ("kl", KL)):
            what = {"rise": "rise of entropy", "kl": "KL, nats"}[name]
            values = [one[name] if one["sigma"] is not None else math.nan for one in found]
            results.append(between(f"{what}, {arm.name}", *limits, values, (arm.name,)))
    ends = by_unit(design, runs, design.reference, final)
    rises = by_unit(design, runs, design.reference, late_rise)
    skills = by_unit(design, runs, design.reference, gain_on_longest)
    return [
        *results,
        between("headroom", HEADROOM, 1.0, [1 - value for value in ends.values()], everything),
        between("rise in the last fifth", 0.0, 1.0, list(rises.values()), everything, must=True),
        between("gain on the longest questions", SKILL, 1.0, list(skills.values()), everything, must=True),
        *controls(design, runs, "gain", tuple(arm.name for arm in design.arms if arm.dosed)),
        *controls(design, runs, "exploration"),
    ]


def between(
    gate: str, low: float, high: float, values: Sequence[float], stops: tuple[str, ...], must: bool = False
) -> Result:
    """Passed if the interval over bases is from `low` to `high`, failed if it is outside; one base is its own interval.

    With `must` the interval has to be above `low`, and needs two bases. A `high` of 1 is no limit.
    """
    limit = f"{low:g} to {high:g}" if high < 1 else f"{'above' if must else 'at least'} {low:g}"
    numbers, top = _numbers(values), high if high < 1 else math.inf
    bottom, peak = (numbers[end] if len(values) > 1 else numbers.get("value", math.nan) for end in ("low", "high"))
    if not values or (must and len(values) < 2):
        word: Word = "open"
    elif (low < bottom if must else low <= bottom) and peak <= top:
        word = "yes"
    else:
        outside = math.isnan(bottom) or (peak <= low if must else peak < low) or bottom > top
        word = "no" if outside else "neither"
    meeting = sum(value > low if must else low <= value <= top for value in values)
    return Result(gate=gate, limit=limit, word=word, meeting=meeting, stops=stops, must=must, **numbers)


def controls(design: Design, runs: Runs, kind: str, stops: tuple[str, ...] = ()) -> list[Result]:
    """The controls of a kind: passed if any of them raises the held-out accuracy, and then by more than the margin.

    A study without one has a result that says so.
    """
    gate, tested = f"control of {kind}", sum(arm.shows is not False for arm in design.arms)
    limit = f"one above {EFFECT:g}, p <= {level(tested):.2g}"
    arms, reference = [arm for arm in design.arms if arm.shows == kind], by_unit(design, runs, design.reference, final)
    effects = {arm.name: _differences(by_unit(design, runs, arm, final), reference) for arm in arms}
    estimates = [mean_ci(values) for values in effects.values() if values]
    all_below = all(one.high < EFFECT for one in estimates)
    word: Word = "open" if len(estimates) < len(arms) else "no" if all_below else "neither"
    if one_passes(estimates, tested):
        word = "yes"
    if not arms:
        return [Result(gate=gate, limit=limit, word="no such arm")]
    return [
        Result(
            gate=f"{gate} {name}", limit=limit, word=word, meeting=sum(value > EFFECT for value in values),
            stops=stops, must=True, **_numbers(values),
        )
        for name, values in effects.items()
    ]  # fmt: skip


def _differences(treated: Mapping[int, float], reference: Mapping[int, float]) -> list[float]:
    """By base; none if fewer than two bases have both."""
    found = [value - reference[base] for base, value in treated.items() if base in reference]
    return found if len(found) > 1 else []


def pass_at(probe: Probe, quant: str, k: int) -> float:
    """pass@k of a base in a weight format; pass@1 is the share of right answers."""
    counts = probe["formats"][quant]
    rows = [[1.0] * correct + [0.0] * (counts["samples"] - correct) for correct in counts["correct"]]
    return pass_at_k(rows, min(k, counts["samples"])).value


def by_unit(design: Design, runs: Runs, arm: Arm, number: Callable[[Run], float]) -> dict[int, float]:
    """A number of the runs of an arm, by base or, in a design of one model, by seed."""
    if len(design.units) > 1:
        return by_base(runs, arm, number)
    return {seed: number(run) for (name, _, seed), run in runs.items() if name == arm.name}


def by_base(runs: Runs, arm: Arm, number: Callable[[Run], float]) -> dict[int, float]:
    """The mean over seeds of a number of the runs of an arm, by base."""
    found: dict[int, list[float]] = {}
    for (name, base, _), run in runs.items():
        if name == arm.name:
            found.setdefault(base, []).append(number(run))
    return {base: fmean(values) for base, values in found.items()}


def final(run: Run) -> float:
    """Held-out accuracy after training."""
    return float(np.mean(np.asarray(held_out("sampled")(run))))


def late_rise(run: Run) -> float:
    """How much the accuracy of rollouts rises over the last fifth of the steps, by a straight line."""
    accuracy = run.series("train", "accuracy").dropna()
    late = accuracy.iloc[-max(2, round(LATE * len(accuracy))) :]
    return float(np.polyfit(late.index.to_numpy(), late.to_numpy(), 1)[0] * (late.index[-1] - late.index[0]))


def gain_on_longest(run: Run) -> float:
    """The gain of held-out accuracy on the questions with the most words, which ask for the most steps.

    They are chosen by length, not by the answers, so that luck at the start does not look like a gain.
    """
    answers = run.answers("sampled")
    words = answers.index.to_series().str.count(" ")
    longest = answers[words >= words.quantile(1 - LONGEST)]
    return float(np.mean((longest[run.option("steps")] - longest[0]).to_numpy()))


def override(results: Iterable[Result], despite: Sequence[str]) -> list[Result]:
    """The results, in which failed gates whose names begin with one of `despite` stop nothing and say so."""
    names = tuple(despite)
    return [replace(one, overridden=one.fails and bool(one.stops) and one.gate.startswith(names)) for one in results]


def stopped(results: Iterable[Result]) -> dict[str, list[str]]:
    """The arms that failed gates stop, each with the gates."""
    arms: dict[str, list[str]] = {}
    for result in results:
        for arm in result.stops if result.fails and not result.overridden else ():
            arms.setdefault(arm, []).append(result.gate)
    return arms


def render(results: Sequence[Result]) -> str:
    """The results as a table in Markdown."""
    rows: list[list[str]] = []
    for one in results:
        interval = "-" if math.isnan(one.low) else f"[{one.low:.4g}, {one.high:.4g}]"
        value = "-" if math.isnan(one.value) else f"{one.value:.4g}"
        meeting = "-" if not one.bases or one.limit == "none" else f"{one.meeting} of {one.bases}"
        word = f"**{one.word}**" if one.fails else one.word
        harm_only = one.gate.startswith("control of exploration") and one.word != "yes"
        other = "harm can be shown, a lack of help cannot" if harm_only else "-"
        stops = f"stops {', '.join(one.stops)}" if one.stops else other
        told = f"{word}, overridden" if one.overridden else word
        rows.append([one.gate, one.limit, value, interval, meeting, told, stops])
    return markdown_table(["gate", "limit", "measured", "interval", "bases that meet it", "passed", "else"], rows)


def to_json(results: Sequence[Result], arms_stopped: Mapping[str, list[str]]) -> str:
    """The results as JSON; numbers that do not exist are null."""
    rows = [
        {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in asdict(one).items()}
        | {"passed": one.passed}
        for one in results
    ]
    return json.dumps({"gates": rows, "stopped": arms_stopped}, indent=1)


def _numbers(values: Sequence[float]) -> dict[str, Any]:
    """Mean and interval over bases, as the fields of a result."""
    if not values:
        return {}
    estimate = mean_ci(values)
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "bases": estimate.n}
