"""task=word_problems: generated multi-step word problems of configurable difficulty, for studies on small models.

Each problem is a chain of people, each with some number more, fewer, times as many, or half as many things as the
person before; the question asks about the last. Distractors own the same things but do not affect the answer. Problems
with the same numbers and operations are one calculation under other names and always fall into the same split.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from qerl_bench.task.operation_chains import Chain, GeneratedTask, Problem, apply
from qerl_core.checks import at_most, check_fields, count, require

NAMES = (
    *("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hal", "Ida", "Jon", "Kai", "Lea", "Mia", "Ned", "Ola"),
    *("Pia", "Quin", "Rob", "Sue", "Tom", "Una", "Vic", "Wes", "Zoe"),
)
THINGS = ("pens", "cups", "eggs", "keys", "nuts", "hats", "maps", "figs", "toys", "caps", "pins", "jars")
MAX_STEPS, MAX_DISTRACTORS = 12, 6
MAX_FACTOR = 5
GROWTH = 10  # no number in a solution exceeds this times max_number
SENTENCES = {
    "+": "{who} has {n} more {things} than {whom}.",
    "-": "{who} has {n} fewer {things} than {whom}.",
    "*": "{who} has {n} times as many {things} as {whom}.",
    "/": "{who} has half as many {things} as {whom}.",
}


@dataclass(frozen=True, kw_only=True)
class WordProblems(GeneratedTask):
    """`steps` and `distractors` list how many of them a problem may have; each number is equally likely."""

    steps: list[int]
    distractors: list[int]
    max_number: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, least, most in (("steps", 1, MAX_STEPS), ("distractors", 0, MAX_DISTRACTORS)):
            counts = getattr(self, key)
            valid = isinstance(counts, list) and all(type(n) is int and least <= n <= most for n in counts)
            require(
                valid and len(counts) > 0,
                f"task.{key} must list the numbers that a problem may have, each {least}..{most}, got {counts!r}",
            )
        check_fields(self, "task", max_number=at_most(10**6, count(2)))

    def check(self) -> None:
        """Raise ConfigError if the options leave no held-out or no training problem."""
        self.eval_prompts(1)
        self.train_prompts(1, 1, 0)

    def options(self) -> str:
        return f"steps={self.steps}, max_number={self.max_number}"

    def random_problem(self, draw: random.Random) -> Problem:
        return random_problem(draw, draw.choice(self.steps), draw.choice(self.distractors), self.max_number)


def random_problem(draw: random.Random, steps: int, distractors: int, max_number: int) -> Problem:
    """A random problem in which every number is a whole number from 1 to GROWTH * max_number."""
    chain = random_steps(draw, steps, max_number)
    people = draw.sample(NAMES, steps + 1 + distractors)
    things = draw.choice(THINGS)
    sentences = [f"{people[0]} has {chain.start} {things}."]
    for i, (op, operand) in enumerate(chain.steps, start=1):
        sentences.append(SENTENCES[op].format(who=people[i], n=operand, things=things, whom=people[i - 1]))
    for stranger in people[steps + 1 :]:
        number, whom = draw.randint(2, max_number), draw.choice(people[: steps + 1])
        absolute = f"{stranger} has {number} {things}."
        relative = SENTENCES["+"].format(who=stranger, n=number, things=things, whom=whom)
        sentences.insert(draw.randint(0, len(sentences)), draw.choice((absolute, relative)))
    sentences.append(f"How many {things} does {people[steps]} have?")
    return Problem(chain, " ".join(sentences))


def random_steps(draw: random.Random, length: int, max_number: int) -> Chain:
    """A chain of operations, each drawn from those of + - * / that keep the value whole and within the limits."""
    start = value = draw.randint(2, max_number)
    steps, results = [], []
    for _ in range(length):
        factors = range(2, min(MAX_FACTOR, GROWTH * max_number // value) + 1)
        operands = {
            "+": range(2, min(max_number, GROWTH * max_number - value) + 1),
            "-": range(2, min(max_number, value - 1) + 1),
            "*": factors,
            "/": range(2, 3 if value % 2 == 0 else 2),
        }
        op = draw.choice([op for op, allowed in operands.items() if len(allowed) > 0])
        operand = draw.choice(operands[op])
        value = apply(value, op, operand)
        steps.append((op, operand))
        results.append(value)
    return Chain(start, tuple(steps), tuple(results))
