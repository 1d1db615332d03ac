"""What the tasks in words and numbers share: prompts without a template, problems that never leave their split.

Text is a row of words with spaces between them, all of them in the vocabulary of model=small. A model
learns such a task from demonstrations made here (experiment=pretrain), and RL continues on the same kind of problems.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

from qerl_bench.task.base import TaskBase
from qerl_bench.task.split import distinct_problems, is_held_out
from qerl_core.checks import check_fields, count
from qerl_core.records import RENDERED, Demonstration, Prompt
from qerl_core.seeding import derive

OPERATORS = "+-*"


@dataclass(frozen=True)
class SymbolicProblem:
    """A question in words, its gold answer, and the key that decides its split."""

    question: str
    answer: str
    key: str


@dataclass(frozen=True, kw_only=True)
class SymbolicTask(TaskBase):
    """A task whose problems and solutions are rows of words. A right answer earns 1, everything else 0."""

    name: str
    max_completion_tokens: int

    def __post_init__(self) -> None:
        check_fields(self, "task", max_completion_tokens=count())

    def random_problem(self, draw: random.Random, split: str) -> SymbolicProblem | None:
        """A random problem for the split "train" or "test", or None if the draw broke a rule."""
        raise NotImplementedError

    def random_demonstration(self, draw: random.Random) -> tuple[SymbolicProblem, str] | None:
        """A random problem and a completion to imitate, or None if the draw broke a rule."""
        raise NotImplementedError

    def options(self) -> str:
        """The options that limit how many different problems there are, for error messages."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ConfigError if the options leave no held-out or no training problem."""
        self.eval_prompts(1)
        self.train_prompts(1, 1, 0)

    def demonstrations(self, step: int, count: int, seed: int) -> list[Demonstration]:
        """Demonstrations of training problems; a problem may occur more than once."""
        draw = random.Random(derive(seed, "demonstrations", step))
        return [
            Demonstration(prompt=self._prompt("train", problem), completion=completion)
            for problem, completion in self._demonstrations(draw, count)
        ]

    def _demonstrations(self, draw: random.Random, count: int) -> Iterator[tuple[SymbolicProblem, str]]:
        while count > 0:
            drawn = self.random_demonstration(draw)
            if drawn is not None and not is_held_out(drawn[0].key):
                count -= 1
                yield drawn

    def normalize(self, question: str) -> str:
        return " ".join(question.split())

    def _prompts(self, split: str, seed: int, count: int) -> list[Prompt]:
        draw = random.Random(seed)
        problems = distinct_problems(
            (self.random_problem(draw, split) for _ in repeat(None)),
            count,
            split == "test",
            key=lambda problem: problem.key,
            task=f"task={self.name}",
            options=f"{self.options()}; widen one",
        )
        return [self._prompt(split, problem) for problem in problems]

    def _prompt(self, split: str, problem: SymbolicProblem) -> Prompt:
        return Prompt(
            id=f"{self.name}/{split}/{problem.question}",
            messages=({"role": RENDERED, "content": problem.question},),
            answer=problem.answer,
            question=problem.question,
        )


def calculate(left: int, op: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[op]
