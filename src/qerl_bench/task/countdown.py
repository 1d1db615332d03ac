"""task=countdown: reach a target from given numbers, each used once. `3 7 11 2 -> 40 :` wants a chain of steps.

A completion is a row of steps `x op y = z ;`. Each takes two numbers that are there and leaves their result; the last
result has to be the target. Random chains are easy to imitate and rarely hit the target, so a pretrained model solves
a problem once in many samples: exploration is scarce, and there are many ways to get better.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from qerl_bench.task.symbolic import OPERATORS, SymbolicProblem, SymbolicTask, calculate
from qerl_core.checks import at_most, check_fields, count, require, share
from qerl_core.records import Prompt, Reward

MAX_VALUE = 200  # the largest number of a chain, as large as the largest number word
STEP = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+) ;")


@dataclass(frozen=True, kw_only=True)
class Countdown(SymbolicTask):
    """`numbers` lists how many numbers a problem may have, each equally likely. Problems for RL and evaluation have a
    solution; a share `hit` of the demonstrations reaches its target, the others end where chance leads them."""

    numbers: list[int]
    max_number: int
    max_target: int
    hit: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            isinstance(self.numbers, list) and self.numbers != [] and all(n in (2, 3, 4, 5, 6) for n in self.numbers),
            f"task.numbers must list how many numbers a problem may have, each 2..6, got {self.numbers!r}",
        )
        limit = at_most(MAX_VALUE, count(2))
        check_fields(self, "task", max_number=limit, max_target=limit, hit=share)

    def options(self) -> str:
        return f"numbers={self.numbers}, max_number={self.max_number}, max_target={self.max_target}"

    def warm_start_overrides(self) -> list[str]:
        """What decides the demonstrations."""
        keys = ("numbers", "max_number", "max_target", "hit")
        return [f"task={self.name}", *(f"task.{key}={getattr(self, key)}".replace(" ", "") for key in keys)]

    def random_problem(self, draw: random.Random, split: str) -> SymbolicProblem | None:
        """A problem whose target is the result of a random chain; None if that is no allowed target."""
        numbers = self._numbers(draw)
        target = random_chain(draw, numbers)[-1][-1]
        return problem_of(numbers, target) if 1 <= target <= self.max_target else None

    def random_demonstration(self, draw: random.Random) -> tuple[SymbolicProblem, str] | None:
        numbers = self._numbers(draw)
        chain = random_chain(draw, numbers)
        target = draw.randint(1, self.max_target)
        if draw.random() < self.hit:
            target = chain[-1][-1]
            if not 1 <= target <= self.max_target:
                return None
        return problem_of(numbers, target), " ".join(f"{x} {op} {y} = {z} ;" for x, op, y, z in chain)

    def reward(self, prompt: Prompt, completion: str, finished: bool = True) -> Reward:
        """1 for a legal chain that ends at the target. `legal` says whether the chain follows the rules.

        A chain that was cut off has no end.
        """
        numbers = [int(word) for word in prompt.question.partition(" ->")[0].split()]
        end = chain_end(numbers, completion) if finished else None
        correct = end is not None and str(end) == prompt.answer
        parts = {"correct": float(correct), "legal": float(end is not None)}
        return Reward(total=float(correct), correct=correct, parts=parts, answer=None if end is None else str(end))

    def _numbers(self, draw: random.Random) -> list[int]:
        return [draw.randint(1, self.max_number) for _ in range(draw.choice(self.numbers))]


def problem_of(numbers: list[int], target: int) -> SymbolicProblem:
    """Problems with the same numbers in another order, and the same target, are in one split."""
    shown = " ".join(map(str, numbers))
    key = f"{' '.join(map(str, sorted(numbers)))} -> {target}"
    return SymbolicProblem(question=f"{shown} -> {target} :", answer=str(target), key=key)


def random_chain(draw: random.Random, numbers: list[int]) -> list[tuple[int, str, int, int]]:
    """Random steps (x, op, y, z) that use all `numbers`, without a negative result or one above MAX_VALUE."""
    pool, steps = list(numbers), []
    while len(pool) > 1:
        x = pool.pop(draw.randrange(len(pool)))
        y = pool.pop(draw.randrange(len(pool)))
        allowed = [op for op in OPERATORS if 0 <= calculate(x, op, y) <= MAX_VALUE]
        if not allowed:  # both large and the smaller one first: the other order has a difference
            x, y, allowed = y, x, ["-"]
        op = draw.choice(allowed)
        z = calculate(x, op, y)
        steps.append((x, op, y, z))
        pool.append(z)
    return steps


def chain_end(numbers: list[int], completion: str) -> int | None:
    """The last result of a chain that uses every number once; None if a step breaks the rules or is cut short."""
    steps = STEP.findall(completion)
    if len(steps) != len(numbers) - 1 or " ".join(completion.split()) != " ".join(
        f"{x} {op} {y} = {z} ;" for x, op, y, z in steps
    ):
        return None
    pool = list(numbers)
    for left, op, right, result in steps:
        x, y, z = int(left), int(right), int(result)
        if x not in pool:
            return None
        pool.remove(x)
        if y not in pool or calculate(x, op, y) != z:
            return None
        pool.remove(y)
        pool.append(z)
    return pool[0]
