"""Training and held-out problems of a generator. The problem itself decides its split, so the splits cannot overlap."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from qerl_core.checks import require

HELD_OUT_SHARE = 8  # one problem in this many is held out


class HasQuestion(Protocol):
    @property
    def question(self) -> str: ...


P = TypeVar("P", bound=HasQuestion)


def is_held_out(key: str) -> bool:
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0


def distinct_problems(
    candidates: Iterator[P | None], count: int, held_out: bool, key: Callable[[P], str], task: str, options: str
) -> list[P]:
    """The first `count` candidates of one split that have different questions; None is skipped.

    `key` decides the split: problems that must not be separated share a key. Raises ConfigError, naming `task` and its
    `options`, if too few are found.
    """
    problems: dict[str, P] = {}
    attempts = 0
    while len(problems) < count:
        problem = next(candidates)
        if problem is not None and is_held_out(key(problem)) == held_out:
            problems.setdefault(problem.question, problem)
        attempts += 1
        require(attempts < 1000 * count + 1000, f"{task} cannot make {count} different problems from {options}")
    return list(problems.values())
