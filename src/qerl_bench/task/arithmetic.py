"""task=arithmetic: the built-in task. Generated chains of operations, evaluated left to right, with held-out problems.

The demonstrations mix three procedures, as the training text of a large model mixes good and bad reasoning: `guess`
answers at once, `hasty` stops one operation early, `careful` works out every operation. A small model taught on the mix
can do all three; RL has to find out which one pays.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import repeat

from qerl_bench.checks import check_fields, count, require
from qerl_bench.records import Demonstration, Prompt
from qerl_bench.seeding import derive
from qerl_bench.task.prompt_task import PromptTask
from qerl_bench.task.prompts import format_demonstration
from qerl_bench.task.split import distinct_problems

PROCEDURES = ("guess", "hasty", "careful")


@dataclass(frozen=True, kw_only=True)
class Arithmetic(PromptTask):
    """Problems such as `17+25-9=?`; the gold answer is the left-to-right result and never negative."""

    operations: list[int]
    operators: str
    max_start: int
    max_operand: int
    procedures: dict[str, float]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            len(self.operations) > 0 and all(type(n) is int and 1 <= n <= 8 for n in self.operations),
            f"task.operations lists how many operations a problem has, each 1..8, got {self.operations}",
        )
        require(
            len(self.operators) > 0 and set(self.operators) <= set("+-*"),
            f"task.operators must be a selection of + - *, got {self.operators!r}",
        )
        check_fields(self, "task", max_start=count(1, 99), max_operand=count(1, 99))
        check_procedures(self.procedures)

    def check(self) -> None:
        """Needs no data."""

    def train_prompts(self, step: int, count: int, seed: int) -> list[Prompt]:
        return [self._prompt(chain) for chain in self._chains(False, derive(seed, "train", step), count)]

    def eval_prompts(self, count: int | None) -> list[Prompt]:
        chains = self._chains(True, derive("held-out"), 1024 if count is None else count)
        return [self._prompt(chain) for chain in chains]

    def demonstrations(self, step: int, count: int, seed: int) -> list[Demonstration]:
        draw = random.Random(derive(seed, "procedures", step))
        chains = self._chains(False, derive(seed, "demonstrations", step), count)
        return [
            Demonstration(
                prompt=self._prompt(chain), completion=demonstrate(chain, self.procedures, self.answer_format, draw)
            )
            for chain in chains
        ]

    def _prompt(self, chain: Chain) -> Prompt:
        return self.prompt_template.prompt(f"arithmetic/{chain.question}", chain.question, str(chain.results[-1]))

    def _chains(self, held_out: bool, seed: int, count: int) -> list[Chain]:
        draw = random.Random(seed)
        return distinct_problems(
            (self._candidate(draw) for _ in repeat(None)),
            count,
            held_out,
            key=lambda chain: chain.question,
            task="task=arithmetic",
            options=f"operations={self.operations}, operators={self.operators!r}, "
            f"max_start={self.max_start}, max_operand={self.max_operand}; widen one",
        )

    def _candidate(self, draw: random.Random) -> Chain | None:
        """A random chain, or None if it had to use an operator that the options exclude."""
        chain = random_chain(draw, draw.choice(self.operations), self.operators, self.max_start, self.max_operand)
        return chain if all(op in self.operators for op, _ in chain.steps) else None


def check_procedures(shares: dict[str, float]) -> None:
    require(
        set(shares) == set(PROCEDURES) and min(shares.values()) >= 0 and sum(shares.values()) > 0,
        f"task.procedures needs a share >= 0 for each of {', '.join(PROCEDURES)}, got {shares}",
    )


@dataclass(frozen=True)
class Chain:
    """start op_1 operand_1 op_2 ...; `results[i]` is the value after operation i."""

    start: int
    steps: tuple[tuple[str, int], ...]
    results: tuple[int, ...]

    @property
    def question(self) -> str:
        return f"{self.start}" + "".join(f"{op}{operand}" for op, operand in self.steps) + "=?"


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


def apply(value: int, op: str, operand: int) -> int:
    return {"+": value + operand, "-": value - operand, "*": value * operand, "/": value // operand}[op]


def demonstrate(chain: Chain, shares: dict[str, float], answer_format: str, draw: random.Random) -> str:
    """The completion written by a procedure that is drawn according to `shares`."""
    return solve(chain, draw.choices(PROCEDURES, [shares[name] for name in PROCEDURES])[0], answer_format)


def solve(chain: Chain, procedure: str, answer_format: str) -> str:
    """The completion that `procedure` writes for a problem."""
    values = [chain.start, *chain.results]
    shown = {"guess": 0, "hasty": len(chain.steps) - 1, "careful": len(chain.steps)}[procedure]
    lines = [f"{values[i]}{op}{operand}={values[i + 1]}" for i, (op, operand) in enumerate(chain.steps[:shown])]
    answer = values[-1] if procedure == "guess" else values[shown]
    return format_demonstration(answer_format, ";".join(lines), str(answer))
