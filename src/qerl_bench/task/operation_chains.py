"""Tasks that generate chains of operations, evaluated left to right, and the demonstrations that solve them.

The demonstrations mix three procedures, as the training text of a large model mixes good and bad reasoning: `guess`
answers at once, `hasty` stops one operation early, `careful` works out every operation. A small model taught on the mix
can do all three; RL has to find out which one pays.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import repeat

from qerl_bench.task.prompt_task import PromptTask
from qerl_bench.task.prompts import format_demonstration
from qerl_bench.task.split import distinct_problems
from qerl_core.checks import require
from qerl_core.records import Demonstration, Prompt
from qerl_core.seeding import derive

PROCEDURES = ("guess", "hasty", "careful")


@dataclass(frozen=True)
class Chain:
    """start op_1 operand_1 op_2 ...; `results[i]` is the value after operation i."""

    start: int
    steps: tuple[tuple[str, int], ...]
    results: tuple[int, ...]

    @property
    def formula(self) -> str:
        return f"{self.start}" + "".join(f"{op}{operand}" for op, operand in self.steps) + "=?"


@dataclass(frozen=True)
class Problem:
    """A chain of operations and the question that states it."""

    chain: Chain
    question: str


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(PromptTask):
    """Problems drawn by `random_problem`.

    `procedures` gives each procedure's share of the demonstrations, `pretrain_procedures` of those that a base of
    model=tiny learned from before the run.
    """

    procedures: dict[str, float]
    pretrain_procedures: dict[str, float]

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("procedures", "pretrain_procedures"):
            shares = getattr(self, key)
            require(
                set(shares) == set(PROCEDURES) and min(shares.values()) >= 0 and sum(shares.values()) > 0,
                f"task.{key} needs a share >= 0 for each of {', '.join(PROCEDURES)}, got {shares}",
            )

    def warm_start_overrides(self) -> list[str]:
        shares = [f"task.procedures.{name}={share}" for name, share in self.pretrain_procedures.items()]
        return [f"task={self.name}", *shares]

    def random_problem(self, draw: random.Random) -> Problem | None:
        """A random problem of either split, or None if the draw broke the options."""
        raise NotImplementedError

    def options(self) -> str:
        """The options that limit how many different problems there are, for error messages."""
        raise NotImplementedError

    def prompt_id(self, split: str, problem: Problem) -> str:
        return f"{self.name}/{split}/{problem.question}"

    def _prompts(self, split: str, seed: int, count: int) -> list[Prompt]:
        return [self._prompt(split, problem) for problem in self._problems(split == "test", seed, count)]

    def demonstrations(self, step: int, count: int, seed: int) -> list[Demonstration]:
        draw = random.Random(derive(seed, "procedures", step))
        demonstrations = []
        for problem in self._problems(False, derive(seed, "demonstrations", step), count):
            procedure = draw.choices(PROCEDURES, [self.procedures[name] for name in PROCEDURES])[0]
            completion = solve(problem.chain, procedure, self.answer_format)
            demonstrations.append(Demonstration(prompt=self._prompt("train", problem), completion=completion))
        return demonstrations

    def _prompt(self, split: str, problem: Problem) -> Prompt:
        answer = str(problem.chain.results[-1])
        return self.prompt_template.prompt(self.prompt_id(split, problem), problem.question, answer)

    def _problems(self, held_out: bool, seed: int, count: int) -> list[Problem]:
        """Different problems of one split. Problems that share a calculation are in the same split."""
        draw = random.Random(seed)
        candidates = (self.random_problem(draw) for _ in repeat(None))
        return distinct_problems(
            candidates,
            count,
            held_out,
            key=lambda problem: problem.chain.formula,
            task=f"task={self.name}",
            options=f"{self.options()}; widen one",
        )


def apply(value: int, op: str, operand: int) -> int:
    return {"+": value + operand, "-": value - operand, "*": value * operand, "/": value // operand}[op]


def solve(chain: Chain, procedure: str, answer_format: str) -> str:
    """The completion that `procedure` writes for a problem."""
    values = [chain.start, *chain.results]
    shown = {"guess": 0, "hasty": len(chain.steps) - 1, "careful": len(chain.steps)}[procedure]
    lines = [f"{values[i]}{op}{operand}={values[i + 1]}" for i, (op, operand) in enumerate(chain.steps[:shown])]
    answer = values[-1] if procedure == "guess" else values[shown]
    return format_demonstration(answer_format, ";".join(lines), str(answer))
