"""The gates of a study: what its bases and first runs must show before the other arms can decide anything.

A gate looks at the reference, at a control, or at what a treatment acts on directly, never at the effect that the study
is about. Intervals are over bases, 95 %; of a design with one model those of training are over seeds. A limit inside of
the interval is neither passed nor failed. What a weight format costs a base is measured and stops nothing: claims about
formats are about that very cost.

Controls are of two kinds. Without a gain that the task can show, no noise can be judged; without exploration that pays,
noise can be said to harm, not to fail to help.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from qerl_core.statistics import mean_ci
from qerl_studies.design.controls import EFFECT, level, one_passes
from qerl_studies.design.design import Design
from qerl_studies.design.limits import GateLimits
from qerl_studies.design.readings import (
    Probe,
    Runs,
    above_half_time,
    by_unit,
    final,
    gain_on_longest,
    gain_where_complete,
    late_rise,
    lenient_gap,
    mixed_groups,
    pass_at,
)
from qerl_studies.effects.pairs import shared
from qerl_studies.effects.state import GATES
from qerl_studies.runs.load import Run
from qerl_studies.tables.markdown import markdown_table

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
    everything, limits = tuple(arm.name for arm in design.arms), design.limits
    return [*of_bases(design, probes, limits, everything), *of_training(design, runs, limits, everything)]


def of_bases(design: Design, probes: Sequence[Probe], limits: GateLimits, everything: tuple[str, ...]) -> list[Result]:
    """What bases and the doses that were found for them must show before any arm is trained."""
    reference, samples, group = design.format_of(design.reference), design.probe.samples, design.samples_per_group

    def of_reference(number: Callable[[Probe, str, int], float], k: int) -> list[float]:
        return [number(one, reference, k) for one in probes]

    results: list[Result] = []
    if limits.pass_at_1:
        results.append(between("pass@1 of the base", *limits.pass_at_1, of_reference(pass_at, 1), everything))
    if limits.pass_at_k:
        results.append(
            between(f"pass@{samples}", limits.pass_at_k, math.inf, of_reference(pass_at, samples), everything)
        )
    if limits.no_success:
        failed = [1 - share for share in of_reference(pass_at, group)]
        results.append(between(f"groups of {group} without success", *limits.no_success, failed, everything))
    if limits.mixed_groups:
        mixed = of_reference(mixed_groups, group)
        results.append(between(f"mixed groups of {group}", limits.mixed_groups, math.inf, mixed, everything))
    for quant in design.formats_of_arms if limits.strict_lenient else ():
        gaps = [gap for one in probes if (gap := lenient_gap(one, quant)) is not None]
        most = limits.strict_lenient or 0.0
        results.append(between(f"lenient minus strict, {quant}", -most, most, gaps, everything))
    for quant in design.formats[1:]:
        lost = [pass_at(one, reference, 1) - pass_at(one, quant, 1) for one in probes if quant in one["formats"]]
        results.append(Result(gate=f"damage by {quant}", limit="none", word="measured", **_numbers(lost)))
    for arm in (arm for arm in design.arms if arm.dosed):
        found = [one["doses"][arm.name] for one in probes if arm.name in one["doses"]]
        for name, what, span in (("rise", "rise of entropy", limits.rise), ("kl", "KL, nats", limits.kl)):
            values = [one[name] if one["sigma"] is not None else math.nan for one in found]
            if span:
                results.append(between(f"{what}, {arm.name}", *span, values, (arm.name,)))
    return results


def of_training(design: Design, runs: Runs, limits: GateLimits, everything: tuple[str, ...]) -> list[Result]:
    """What the reference must show by training, and the controls."""

    def of_reference(number: Callable[[Run], float]) -> list[float]:
        return by_unit(design, runs, design.reference.name, number).tolist()

    results: list[Result] = []
    if limits.headroom is not None:
        left = of_reference(lambda run: 1 - final(run))
        results.append(between("headroom", limits.headroom, math.inf, left, everything))
    if limits.gain is not None:
        results.append(
            between("gain where complete", limits.gain, math.inf, of_reference(gain_where_complete), everything)
        )
    for gate, limit, number in (
        ("rise in the last fifth", limits.late_rise, late_rise),
        ("gain on the longest questions", limits.longest, gain_on_longest),
        ("end above half time", limits.above_half_time, above_half_time),
    ):
        if limit is not None:
            results.append(between(gate, limit, math.inf, of_reference(number), everything, must=True))
    dosed = tuple(arm.name for arm in design.arms if arm.dosed)
    return [*results, *controls(design, runs, "gain", dosed), *controls(design, runs, "exploration")]


def between(
    gate: str, low: float, high: float, values: Sequence[float], stops: tuple[str, ...], must: bool = False
) -> Result:
    """Passed if the interval over bases is from `low` to `high`, failed if it is outside; one base is its own interval.

    With `must` the interval has to be above `low`, and needs two bases.
    """
    limit = f"{low:g} to {high:g}" if high < math.inf else f"{'above' if must else 'at least'} {low:g}"
    numbers = _numbers(values)
    bottom, peak = (numbers[end] if len(values) > 1 else numbers.get("value", math.nan) for end in ("low", "high"))
    if not values or (must and len(values) < 2):
        word: Word = "open"
    elif (low < bottom if must else low <= bottom) and peak <= high:
        word = "yes"
    else:
        outside = math.isnan(bottom) or (peak <= low if must else peak < low) or bottom > high
        word = "no" if outside else "neither"
    meeting = sum(value > low if must else low <= value <= high for value in values)
    return Result(gate=gate, limit=limit, word=word, meeting=meeting, stops=stops, must=must, **numbers)


def controls(design: Design, runs: Runs, kind: str, stops: tuple[str, ...] = ()) -> list[Result]:
    """The controls of a kind: passed if any of them raises the held-out accuracy, and then by more than the margin.

    A study without one has a result that says so.
    """
    gate, tested = f"control of {kind}", sum(arm.shows is not False for arm in design.arms)
    limit = f"one above {EFFECT:g}, p <= {level(tested):.2g}"
    arms = [arm.name for arm in design.arms if arm.shows == kind]
    if not arms:
        return [Result(gate=gate, limit=limit, word="no such arm")]
    reference = by_unit(design, runs, design.reference.name, final)
    gaps = {arm: shared(by_unit(design, runs, arm, final), reference).tolist() for arm in arms}
    effects = {arm: values if len(values) > 1 else [] for arm, values in gaps.items()}
    estimates = [mean_ci(values) for values in effects.values() if values]
    all_below = all(one.high < EFFECT for one in estimates)
    word: Word = "open" if len(estimates) < len(arms) else "no" if all_below else "neither"
    if one_passes(estimates, tested):
        word = "yes"
    return [
        Result(
            gate=f"{gate} {name}", limit=limit, word=word, meeting=sum(value > EFFECT for value in values),
            stops=stops, must=True, **_numbers(values),
        )
        for name, values in effects.items()
    ]  # fmt: skip


def override(results: Iterable[Result], despite: Sequence[str]) -> list[Result]:
    """The results, in which failed gates whose names begin with one of `despite` stop nothing and say so."""
    names = tuple(despite)
    return [replace(one, overridden=one.fails and bool(one.stops) and one.gate.startswith(names)) for one in results]


def blocked(results: Iterable[Result]) -> dict[str, list[str]]:
    """The arms that failed gates stop, each with the gates."""
    arms: dict[str, list[str]] = {}
    for result in results:
        for arm in result.stops if result.fails and not result.overridden else ():
            arms.setdefault(arm, []).append(result.gate)
    return arms


def render(results: Sequence[Result]) -> str:
    """The results as a table in Markdown."""
    rows: list[list[str]] = []
    for result in results:
        interval = f"[{result.low:.4g}, {result.high:.4g}]" if result.low < result.high else "-"
        value = "-" if math.isnan(result.value) else f"{result.value:.4g}"
        meeting = "-" if not result.bases or result.limit == "none" else f"{result.meeting} of {result.bases}"
        shown = GATES.get(result.word, result.word)
        word = f"**{shown}**" if result.fails else shown
        harm_only = result.gate.startswith("control of exploration") and result.word != "yes"
        other = "harm can be shown, a lack of help cannot" if harm_only else "-"
        stops = f"stops {', '.join(result.stops)}" if result.stops else other
        told = f"{word}, overridden" if result.overridden else word
        rows.append([result.gate, result.limit, value, interval, meeting, told, stops])
    return markdown_table(
        ["gate", "limit", "measured", "95 %, questions fixed", "bases that meet it", "word", "else"], rows
    )


def to_json(results: Sequence[Result], blocked_arms: Mapping[str, list[str]]) -> str:
    """The results as JSON; numbers that do not exist are null."""
    rows = [
        {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in asdict(one).items()}
        | {"passed": one.passed}
        for one in results
    ]
    return json.dumps({"gates": rows, "stopped": blocked_arms}, indent=1)


def _numbers(values: Sequence[float]) -> dict[str, Any]:
    """Mean and interval over bases, as the fields of a result."""
    if not values:
        return {}
    estimate = mean_ci(values)
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "bases": estimate.n}
