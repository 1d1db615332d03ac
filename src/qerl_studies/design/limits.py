"""The limits of a study's gates: the `gates` of a study.yaml, or those of the studies of built-in tasks.

gates:                              # only these are asked; without `gates`, those of BUILT_IN
  pass_at_1: [0.15, 0.65]           # of the base at temperature 1, from and to
  mixed_groups: 0.4                 # share of groups with right and wrong answers, at least
  strict_lenient: 0.02              # what the format may cost: right by the last number minus right as asked, at most
  gain: 0.1                         # of the reference over training, at least, of answers complete at both ends
  above_half_time: 0.01             # by which its end is above its half time
  rise: [0.05, 0.15]                # of the entropy, by matched noise
  kl: [0.01, 0.1]                   # nats a token between the sampler with matched noise and the trainer
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from qerl_core.checks import Check, check_fields, is_number, optional, require

Span = tuple[float, float]
SPAN = Check(
    lambda value: isinstance(value, tuple) and len(value) == 2 and all(map(is_number, value)) and value[0] < value[1],
    "two numbers, from and to",
)
SHARE = Check(lambda value: is_number(value) and 0 <= value < 1, "a number from 0 to below 1")  # type: ignore[operator]


@dataclass(frozen=True, kw_only=True)
class GateLimits:
    """A limit for each gate; None: it is not asked. Damage by a format is measured in any case, and stops nothing."""

    pass_at_1: Span | None = None
    pass_at_k: float | None = None  # of as many samples as the probe draws, at least
    no_success: Span | None = None  # groups in which no completion is right
    mixed_groups: float | None = None
    strict_lenient: float | None = None
    rise: Span | None = None
    kl: Span | None = None
    headroom: float | None = None  # between the reference's end and the ceiling, which is 1, at least
    late_rise: float | None = None  # of the reference's reward in the last fifth of its steps
    longest: float | None = None  # gain of the reference on the longest questions
    gain: float | None = None
    above_half_time: float | None = None

    def __post_init__(self) -> None:
        spans = ("pass_at_1", "no_success", "rise", "kl")
        shares = [field.name for field in fields(self) if field.name not in spans]
        check_fields(self, "gates", **dict.fromkeys(spans, optional(SPAN)), **dict.fromkeys(shares, optional(SHARE)))


PASS_AT_1 = (0.10, 0.40)  # of built-in tasks
PASS_AT_K = 0.80
NO_SUCCESS = (0.20, 0.50)
BUILT_IN = GateLimits(
    pass_at_1=PASS_AT_1,
    pass_at_k=PASS_AT_K,
    no_success=NO_SUCCESS,
    rise=(0.05, 0.15),
    kl=(0.01, 0.10),
    headroom=0.15,
    late_rise=0.0,
    longest=0.05,
)


def read_limits(content: object) -> GateLimits:
    """Those of the `gates` of a study.yaml, None for BUILT_IN. Raises ConfigError for unknown or wrong entries."""
    if content is None:
        return BUILT_IN
    known = {field.name for field in fields(GateLimits)}
    entries: Mapping[str, Any] = content if isinstance(content, Mapping) else {}
    unknown = sorted({str(key) for key in entries} - known)
    require(
        bool(entries) and not unknown,
        f"gates must have entries of {', '.join(sorted(known))}, got {unknown or content!r}",
    )
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entries.items()}
    return GateLimits(**given)
