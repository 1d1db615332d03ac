"""The gates of a study: what its bases and first runs must show before the other arms can decide anything.

A gate looks at the reference, at a control, or at what a treatment acts on directly, never at the effect that the study
is about. Intervals are over bases, 95 %.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from qerl_bench.claims.measure import LATE, held_out
from qerl_bench.gates.design import Arm, Design
from qerl_bench.statistics import Estimate, mean_ci, pass_at_k
from qerl_bench.study.load import Run

PASS_AT_1 = (0.10, 0.40)
PASS_AT_K = 0.80  # of as many samples as the probe draws, 64 in a study
NO_SUCCESS = (0.20, 0.50)  # groups in which no completion is right
DAMAGE = (0.01, 0.05)  # of the base's pass@1, by a weight format
RISE = (0.05, 0.15)  # of the entropy, by matched noise
KL = (0.01, 0.10)  # nats a token between the sampler with matched noise and the trainer
HEADROOM = 0.15  # between the reference's end and the ceiling, which is 1: every problem has an answer
SKILL = 0.05  # that the reference gains on the longest questions
LONGEST = 0.25  # the share of the held-out questions that count as the longest, at least
EFFECT = 0.01  # accuracy that a control must move, the margin of the claims
LEVEL = 0.01  # of the two-sided test of a control, over all controls

Probe = Mapping[str, Any]
Runs = Mapping[tuple[str, int, int], Run]  # by arm, base and seed


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured for one gate. `passed` is None as long as it is open; a failed gate stops the arms `stops`.

    `meeting` of `bases` meet the limit by themselves. A mean can be where no base is.
    """

    gate: str
    limit: str
    value: float
    low: float
    high: float
    bases: int
    meeting: int
    passed: bool | None
    stops: tuple[str, ...]


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
        arms = tuple(arm.name for arm in design.arms if design.format_of(arm) == quant)
        results.append(between(f"damage by {quant}", *DAMAGE, lost, arms))
    for arm in (arm for arm in design.arms if arm.dosed):
        found = [one["doses"][arm.name] for one in probes if arm.name in one["doses"]]
        for name, limits in (("rise", RISE), ("kl", KL)):
            what = {"rise": "rise of entropy", "kl": "KL, nats"}[name]
            values = [one[name] if one["sigma"] is not None else math.nan for one in found]
            results.append(between(f"{what}, {arm.name}", *limits, values, (arm.name,)))
    ends = by_base(runs, design.reference, final)
    rises = by_base(runs, design.reference, late_rise)
    skills = by_base(runs, design.reference, gain_on_longest)
    return [
        *results,
        between("headroom", HEADROOM, 1.0, [1 - value for value in ends.values()], everything),
        between("rise in the last fifth", 0.0, 1.0, list(rises.values()), everything, surely=True),
        between("gain on the longest questions", SKILL, 1.0, list(skills.values()), everything, surely=True),
        *controls(design, runs),
    ]


def between(
    gate: str, low: float, high: float, values: Sequence[float], stops: tuple[str, ...], surely: bool = False
) -> Result:
    """Passed if the mean over bases is from `low` to `high`; `surely` if its interval is above `low` too."""
    limit = f"{low:g} to {high:g}" if high < 1 else f"{'above' if surely else 'at least'} {low:g}"
    estimate = mean_ci(values) if values else None
    passed = None
    if estimate is not None and not (surely and estimate.n < 2):
        above = low < estimate.low if surely else low <= estimate.value
        passed = bool(above and estimate.value <= high)
    meeting = sum(value > low if surely else low <= value <= high for value in values)
    return _result(gate, limit, estimate, meeting, passed, stops)


def controls(design: Design, runs: Runs) -> list[Result]:
    """Each control: passed if any of them moves the held-out accuracy, and then by more than the margin."""
    arms = [arm for arm in design.arms if arm.control]
    reference = by_base(runs, design.reference, final)
    estimates: dict[str, Estimate] = {}
    meeting: dict[str, int] = {}
    for arm in arms:
        treated = by_base(runs, arm, final)
        shared = [treated[base] - reference[base] for base in treated if base in reference]
        if len(shared) > 1:
            estimates[arm.name] = mean_ci(shared)
            meeting[arm.name] = sum(abs(difference) > EFFECT for difference in shared)
    moved = [abs(one.value) > EFFECT and one.p_outside(0.0) <= LEVEL / len(arms) for one in estimates.values()]
    passed = any(moved) if len(estimates) == len(arms) or any(moved) else None
    stops = tuple(arm.name for arm in design.arms if arm.dosed)
    limit = f"one beyond {EFFECT:g}, p <= {LEVEL / max(len(arms), 1):.2g}"
    return [
        _result(f"control {arm.name}", limit, estimates.get(arm.name), meeting.get(arm.name, 0), passed, stops)
        for arm in arms
    ]


def pass_at(probe: Probe, quant: str, k: int) -> float:
    """pass@k of a base in a weight format; pass@1 is the share of right answers."""
    counts = probe["formats"][quant]
    rows = [[1.0] * correct + [0.0] * (counts["samples"] - correct) for correct in counts["correct"]]
    return pass_at_k(rows, min(k, counts["samples"])).value


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


def stopped(results: Iterable[Result], despite: Sequence[str] = ()) -> dict[str, list[str]]:
    """The arms that failed gates stop, each with the gates; those named in `despite` stop none."""
    arms: dict[str, list[str]] = {}
    for result in results:
        if result.passed is False and not any(result.gate.startswith(name) for name in despite):
            for arm in result.stops:
                arms.setdefault(arm, []).append(result.gate)
    return arms


def render(results: Sequence[Result]) -> str:
    """The results as a table in Markdown."""
    words = {True: "yes", False: "**no**", None: "open"}
    lines = [
        "| gate | limit | measured | interval | bases that meet it | passed | else stops |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in results:
        interval = "-" if math.isnan(one.low) else f"[{one.low:.4g}, {one.high:.4g}]"
        value = "-" if math.isnan(one.value) else f"{one.value:.4g}"
        meeting, stops = f"{one.meeting} of {one.bases}" if one.bases else "-", ", ".join(one.stops)
        lines.append(f"| {one.gate} | {one.limit} | {value} | {interval} | {meeting} | {words[one.passed]} | {stops} |")
    return "\n".join(lines)


def to_json(results: Sequence[Result], arms_stopped: Mapping[str, list[str]]) -> str:
    """The results as JSON; numbers that do not exist are null."""
    rows = [
        {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in asdict(one).items()}
        for one in results
    ]
    return json.dumps({"gates": rows, "stopped": arms_stopped}, indent=1)


def _result(
    gate: str, limit: str, estimate: Estimate | None, meeting: int, passed: bool | None, stops: tuple[str, ...]
) -> Result:
    value, low, high, n = (math.nan, math.nan, math.nan, 0)
    if estimate is not None:
        value, low, high, n = estimate.value, estimate.low, estimate.high, estimate.n
    return Result(
        gate=gate, limit=limit, value=value, low=low, high=high, bases=n, meeting=meeting, passed=passed, stops=stops
    )
