"""What to do with a model, from its probe: answer format, token limit, size of noise, and whether to train at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qerl_studies.probes.numbers import MOST_CUT, accuracy, of_scale, signal

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
    quant, first = next(iter(record["formats"].items()))
    plain = first["temperatures"]["1"]
    right, group = accuracy(plain).value, min(record["group"], plain["samples"])
    mixed, (low, high) = signal(plain, group), LEARNABLE
    yes = low <= right <= high and mixed >= LEAST_SIGNAL
    return (
        f"something to learn: {'yes' if yes else 'no'}. At temperature 1 {quant} has {right:.1%} right, wanted are "
        f"{low:.0%} to {high:.0%}, and {mixed:.0%} of groups of {group} are mixed, wanted are {LEAST_SIGNAL:.0%}"
    )
