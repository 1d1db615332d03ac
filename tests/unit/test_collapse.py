"""train/collapse.py against runs of which the end is known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from qerl_bench.train.collapse import collapse

UNIFORM = math.log(1000)  # 6.91 nats


def _run(**ends: tuple[float | None, float | None]) -> list[dict[str, Any]]:
    """Six steps, each metric with its first value in the first step, and evaluations around."""
    names = {"entropy": "entropy_clean", "garbled": "completions/garbled_frac", "accuracy": "accuracy"}
    steps = [
        {"kind": "train", "step": step, **{names[key]: values[step > 1] for key, values in ends.items()}}
        for step in range(1, 7)
    ]
    return [{"kind": "eval", "step": 0}, *steps, {"kind": "eval", "step": 6}]


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ({"entropy": (1.0, 5.6)}, "entropy_clean rose from 1.00 to 5.60 nats/token, and uniform is 6.91"),
        ({"entropy": (1.0, 5.5)}, None),
        ({"entropy": (6.9, 6.9)}, None),  # an untrained base
        ({"entropy": (1.0, 0.0)}, None),  # sure of itself, which is what training is for
        ({"garbled": (0.1, 0.95)}, "garbled_frac rose from 0.10 to 0.95"),
        ({"garbled": (0.8, 0.95)}, None),
        ({"accuracy": (0.3, 0.0)}, "accuracy fell from 0.30 to 0"),
        ({"accuracy": (0.3, 0.01)}, None),
        ({"accuracy": (0.05, 0.0)}, None),
        ({"entropy": (1.0, None), "garbled": (0.1, 0.95)}, "garbled"),  # written as null, since it was not finite
        ({}, None),
    ],
)
def test_signs(ends: dict[str, tuple[float | None, float | None]], says: str | None) -> None:
    reason = collapse(_run(**ends), UNIFORM)
    assert reason is None if says is None else says in str(reason)


def test_a_run_of_few_steps_shows_nothing() -> None:
    assert collapse(_run(entropy=(1.0, 6.0))[:6], UNIFORM) is None
    assert collapse([], UNIFORM) is None
