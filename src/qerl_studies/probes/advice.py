"""What to do with a model, from its probe: answer format, token limit, size of noise, and whether to train at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qerl_core.statistics import Estimate
from qerl_studies.effects.estimate import share
from qerl_studies.probes.numbers import MOST_CUT, accuracy, of_scale, signal
from qerl_studies.probes.page import interval

LEARNABLE = (0.15, 0.65)  # pass@1 of the first format, at temperature 1
LEAST_SIGNAL = 0.4  # of groups
ROUND = 16  # tokens, to which limits are rounded up


def advice(record: Mapping[str, Any]) -> list[str]:
    """Sentences, each with the number behind it and the option to set."""
    return [
        *answer_format(record),
        *token_limit(record),
        *(f"{quant}: {noise(one, record)}" for quant, one in record["formats"].items() if "rise" in one),
        learnable(record),
    ]


def answer_format(record: Mapping[str, Any]) -> list[str]:
    found, best = record["answer_formats"], record["answer_format"]
    if not found:
        return []
    asked = len(found[best]["correct"])
    shares = ", ".join(f"{sum(one['correct']) / asked:.0%} in {name}" for name, one in found.items())
    if not sum(found[best]["correct"]):
        return [f"no answer format is known to work: of {asked} greedy answers none is right in {', '.join(found)}"]
    return [f"task.answer_format={best}: of {asked} greedy answers, asked in each format, are right {shares}"]


def token_limit(record: Mapping[str, Any]) -> list[str]:
    """The limit for greedy answers, with what it would mean for sampled ones; none if nothing was asked greedily."""
    quant, first = next(iter(record["formats"].items()))
    greedy, limit = first["temperatures"].get("0"), record["max_completion_tokens"]
    if greedy is None:
        return []
    if greedy["enough_tokens"] is None:
        cut = 1 - greedy["finished"]
        return [
            f"task.max_completion_tokens above {limit}: {cut:.0%} of the greedy answers in {quant} are cut off there; "
            f"try {2 * limit}, unless they repeat themselves"
        ]
    enough = min(limit, -(-greedy["enough_tokens"] // ROUND) * ROUND)
    return [f"task.max_completion_tokens={enough}: at most {MOST_CUT:.0%} of the greedy answers in {quant} are longer"]


def noise(measured: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """The sigma of the wanted rise."""
    rise, found = record["options"]["rise"], measured["rise"]
    if found["sigma"] is None:
        return f"no sigma raises the entropy by {rise:.0%}"
    share = of_scale(measured, found["sigma"])
    size = "" if share == "-" else f" ({share} of the median norm scale)"
    return (
        f"sigma {found['sigma']:g}{size} raises the entropy by {rise:.0%} ({found['rise']:+.0%} on other prompts, KL "
        f"{found['kl']:.2g} nats a token): aqn=constant aqn.level={found['sigma']:g}, or "
        f"aqn=matched aqn.sigma_of_base={found['sigma']:g}"
    )


def learnable(record: Mapping[str, Any]) -> str:
    """Whether training has a signal. Open as long as an interval over questions holds both what is wanted and not."""
    quant, first = next(iter(record["formats"].items()))
    plain = first["temperatures"]["1"]
    group, (low, high) = min(record["group"], plain["samples"]), LEARNABLE
    right, mixed = accuracy(plain), signal(plain, group)
    (least, most), (fewest, largest) = _span(right), _span(mixed)
    if most < low or least > high or largest < LEAST_SIGNAL:
        word = "no"
    elif low <= least and most <= high and fewest >= LEAST_SIGNAL:
        word = "yes"
    else:
        word = f"open, too few questions to tell ({right.n})"
    return (
        f"something to learn: {word}. At temperature 1 {quant} has {interval(right, '.1f')} % right, wanted are "
        f"{low:.0%} to {high:.0%}, and {interval(mixed, '.0f')} % of groups of {group} are mixed, wanted are "
        f"{LEAST_SIGNAL:.0%}"
    )


def _span(found: Estimate) -> tuple[float, float]:
    """The interval of a share; that of Wilson where no question differs."""
    if found.stderr == 0 and found.value in (0, 1):
        found = share([bool(found.value)] * found.n)
    return (0.0, 1.0) if math.isnan(found.low) else (found.low, found.high)  # of one question nothing is known
