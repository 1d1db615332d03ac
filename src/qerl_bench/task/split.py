"""Train and held-out problems of a generator: which is which is fixed by the problem itself, so the two never meet."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from qerl_bench.checks import require

HELD_OUT_SHARE = 8  # one problem in this many is held out

Problem = TypeVar("Problem")


def is_held_out(key: str) -> bool:
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0


def distinct(
    draw: Callable[[int], Problem | None],
    count: int,
    held_out: bool,
    question: Callable[[Problem], str],
    key: Callable[[Problem], str],
    task: str,
    options: str,
) -> list[Problem]:
    """`count` problems of one split with different questions, from `draw`(0), `draw`(1), ...; None draws nothing.

    `key` is what decides on the split: problems that should not be told apart share it. Raises ConfigError, naming the
    `task` and its `options`, if there are too few of them.
    """
    found: dict[str, Problem] = {}
    attempts = 0
    while len(found) < count:
        problem = draw(attempts)
        if problem is not None and is_held_out(key(problem)) == held_out:
            found.setdefault(question(problem), problem)
        attempts += 1
        require(attempts < 1000 * count + 1000, f"{task} cannot make {count} different problems from {options}")
    return list(found.values())
