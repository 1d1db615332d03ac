"""task=arithmetic: the built-in world. Generated chains of operations, worked left to right, with held-out problems.

The demonstrations mix three procedures, as the text behind a large model mixes good and bad reasoning: `guess` answers
at once, `hasty` stops one operation early, `careful` works out every operation. A small model taught on the mix can do
all three; which one pays is what RL then has to find out.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from qerl_bench.errors import require
from qerl_bench.records import Demonstration, Prompt, Reward
from qerl_bench.seeding import derive
from qerl_bench.task.base import INSTRUCTION
from qerl_bench.task.judge import Judge

PROCEDURES = ("guess", "hasty", "careful")
HELD_OUT_SHARE = 8  # one problem in this many belongs to the held-out split


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Problems such as `17+25-9=?`; the gold answer is the left-to-right result and never negative."""

    name: str
    operations: list[int]
    operators: str
    max_start: int
    max_operand: int
    max_completion_tokens: int
    answer_format: str
    correct_weight: float
    format_weight: float
    procedures: dict[str, float]

    def __post_init__(self) -> None:
        require(
            len(self.operations) > 0 and all(type(n) is int and 1 <= n <= 8 for n in self.operations),
            f"task.operations lists how many operations a problem has, each 1..8, got {self.operations}",
        )
        require(
            len(self.operators) > 0 and set(self.operators) <= set("+-*"),
            f"task.operators must be a selection of + - *, got {self.operators!r}",
        )
        for key in ("max_start", "max_operand"):
            value = getattr(self, key)
            require(type(value) is int and 1 <= value <= 99, f"task.{key} must be 1..99, got {value!r}")
        require(
            type(self.max_completion_tokens) is int and self.max_completion_tokens >= 1,
            f"task.max_completion_tokens must be at least 1, got {self.max_completion_tokens!r}",
        )
        self.judge.check()
        shares = self.procedures
        require(
            set(shares) == set(PROCEDURES) and min(shares.values()) >= 0 and sum(shares.values()) > 0,
            f"task.procedures needs a share >= 0 for each of {', '.join(PROCEDURES)}, got {shares}",
        )

    def check(self) -> None:
        """Generated, so there is nothing that could be missing."""

    def train_prompts(self, step: int, count: int, seed: int) -> list[Prompt]:
        return [self._prompt(chain) for chain in self._chains("train", derive(seed, "train", step), count)]

    def eval_prompts(self, count: int | None) -> list[Prompt]:
        return [
            self._prompt(chain) for chain in self._chains("eval", derive("held-out"), 1024 if count is None else count)
        ]

    def demonstrations(self, step: int, count: int, seed: int) -> list[Demonstration]:
        draw = random.Random(derive(seed, "procedures", step))
        weights = [self.procedures[name] for name in PROCEDURES]
        return [
            Demonstration(prompt=self._prompt(chain), completion=solve(chain, draw.choices(PROCEDURES, weights)[0]))
            for chain in self._chains("train", derive(seed, "demonstrations", step), count)
        ]

    def reward(self, prompt: Prompt, completion: str) -> Reward:
        return self.judge.reward(prompt.answer, completion)

    @property
    def judge(self) -> Judge:
        return Judge.of(self, "numeric")

    def _prompt(self, chain: Chain) -> Prompt:
        messages = ({"role": "system", "content": INSTRUCTION}, {"role": "user", "content": chain.question})
        return Prompt(id=f"arithmetic/{chain.question}", messages=messages, answer=str(chain.results[-1]))

    def _chains(self, split: str, seed: int, count: int) -> list[Chain]:
        """`count` different problems of one split; which split a problem belongs to is fixed by its text."""
        draw = random.Random(seed)
        chains: dict[str, Chain] = {}
        attempts = 0
        while len(chains) < count:
            chain = random_chain(draw, draw.choice(self.operations), self.operators, self.max_start, self.max_operand)
            held_out = int(hashlib.sha256(chain.question.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0
            if held_out == (split == "eval") and all(op in self.operators for op, _ in chain.steps):
                chains.setdefault(chain.question, chain)
            attempts += 1
            require(
                attempts < 1000 * count + 1000,
                f"task=arithmetic cannot make {count} different problems from operations={self.operations}, "
                f"operators={self.operators!r}, max_start={self.max_start}, max_operand={self.max_operand}; widen one",
            )
        return list(chains.values())


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

    Where the drawn operator would break that, another takes its place, for want of a better one + .
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
    return {"+": value + operand, "-": value - operand, "*": value * operand}[op]


def solve(chain: Chain, procedure: str) -> str:
    """The completion that `procedure` writes for a problem, in think and answer tags."""
    values = [chain.start, *chain.results]
    shown = {"guess": 0, "hasty": len(chain.steps) - 1, "careful": len(chain.steps)}[procedure]
    lines = [f"{values[i]}{op}{operand}={values[i + 1]}" for i, (op, operand) in enumerate(chain.steps[:shown])]
    answer = values[-1] if procedure == "guess" else values[shown]
    return f"<think>{';'.join(lines)}</think><answer>{answer}</answer>"
