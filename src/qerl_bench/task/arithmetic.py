"""task=arithmetic: the built-in task. Chains of operations such as 17+25-9=?, evaluated left to right."""

from __future__ import annotations

import random
from dataclasses import dataclass

from qerl_bench.task.operation_chains import Chain, GeneratedTask, Problem, apply
from qerl_core.checks import at_most, check_fields, count, require


@dataclass(frozen=True, kw_only=True)
class Arithmetic(GeneratedTask):
    """The gold answer is the left-to-right result; it is never negative."""

    operations: list[int]
    operators: str
    max_start: int
    max_operand: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            len(self.operations) > 0 and all(type(n) is int and 1 <= n <= 8 for n in self.operations),
            f"task.operations must list how many operations a problem may have, each 1..8, got {self.operations}",
        )
        require(
            len(self.operators) > 0 and set(self.operators) <= set("+-*"),
            f"task.operators must be a selection of + - *, got {self.operators!r}",
        )
        check_fields(self, "task", max_start=at_most(99, count()), max_operand=at_most(99, count()))

    def prompt_id(self, split: str, problem: Problem) -> str:
        return f"arithmetic/{problem.question}"

    def options(self) -> str:
        return (
            f"operations={self.operations}, operators={self.operators!r}, max_start={self.max_start}, "
            f"max_operand={self.max_operand}"
        )

    def random_problem(self, draw: random.Random) -> Problem | None:
        """A random problem, or None if it had to use an operator that the options exclude."""
        chain = random_chain(draw, draw.choice(self.operations), self.operators, self.max_start, self.max_operand)
        return Problem(chain, chain.formula) if all(op in self.operators for op, _ in chain.steps) else None


def random_chain(draw: random.Random, length: int, operators: str, max_start: int, max_operand: int) -> Chain:
    """A chain whose running value is never negative; products use factors 2..5 of values up to 30.

    An operator that would break this is replaced, by + if nothing else fits.
    """
    start = value = draw.randint(1, max_start)
    steps, results = [], []
    for _ in range(length):
        op = draw.choice(operators)
        if op == "*" and value > 30:
            op = "-" if "-" in operators else "+"
        if op == "-" and value == 0:
            op = "+"
        high = {"+": max_operand, "-": min(value, max_operand), "*": 5}[op]
        operand = draw.randint(2 if op == "*" else 1, high)
        value = apply(value, op, operand)
        steps.append((op, operand))
        results.append(value)
    return Chain(start, tuple(steps), tuple(results))
