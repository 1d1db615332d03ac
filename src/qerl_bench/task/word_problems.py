"""task=word_problems: generated multi-step word problems of configurable difficulty, for studies on small models.

Each problem is a chain of people, each with some number more, fewer, times as many, or half as many things as the
person before; the question asks about the last. Distractors own the same things but do not affect the answer. Problems
with the same numbers and operations are one calculation under other names and always fall into the same split.
Demonstrations mix the three procedures of task=arithmetic.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import repeat

from qerl_bench.checks import check_fields, count, require
from qerl_bench.records import Demonstration, Prompt
from qerl_bench.seeding import derive
from qerl_bench.task.arithmetic import Chain, apply, check_procedures, demonstrate
from qerl_bench.task.prompt_task import PromptTask
from qerl_bench.task.split import distinct_problems

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


@dataclass(frozen=True)
class Story:
    """A chain of operations and the text that tells it, distractors included."""

    chain: Chain
    question: str

    @property
    def calculation(self) -> str:
        """The problem without its words."""
        return self.chain.question


@dataclass(frozen=True, kw_only=True)
class WordProblems(PromptTask):
    """`steps` and `distractors` list how many of them a problem may have; each number is equally likely."""

    steps: list[int]
    distractors: list[int]
    max_number: int
    procedures: dict[str, float]

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, least, most in (("steps", 1, MAX_STEPS), ("distractors", 0, MAX_DISTRACTORS)):
            counts = getattr(self, key)
            valid = isinstance(counts, list) and all(type(n) is int and least <= n <= most for n in counts)
            require(
                valid and len(counts) > 0,
                f"task.{key} must list the numbers that a problem may have, each {least}..{most}, got {counts!r}",
            )
        check_fields(self, "task", max_number=count(2, 10**6))
        check_procedures(self.procedures)

    def check(self) -> None:
        """Raise ConfigError if the options leave no held-out or no training problem."""
        self.eval_prompts(1)
        self.train_prompts(1, 1, 0)

    def warm_start_overrides(self) -> list[str]:
        return [f"task={self.name}"]

    def train_prompts(self, step: int, count: int, seed: int) -> list[Prompt]:
        return [self._prompt("train", story) for story in self._stories(False, derive(seed, "train", step), count)]

    def eval_prompts(self, count: int | None) -> list[Prompt]:
        stories = self._stories(True, derive("held-out"), 1024 if count is None else count)
        return [self._prompt("test", story) for story in stories]

    def demonstrations(self, step: int, count: int, seed: int) -> list[Demonstration]:
        draw = random.Random(derive(seed, "procedures", step))
        stories = self._stories(False, derive(seed, "demonstrations", step), count)
        return [
            Demonstration(
                prompt=self._prompt("train", story),
                completion=demonstrate(story.chain, self.procedures, self.answer_format, draw),
            )
            for story in stories
        ]

    def _prompt(self, split: str, story: Story) -> Prompt:
        answer = str(story.chain.results[-1])
        return self.prompt_template.prompt(f"{self.name}/{split}/{story.question}", story.question, answer)

    def _stories(self, held_out: bool, seed: int, count: int) -> list[Story]:
        draw = random.Random(seed)
        return distinct_problems(
            (self._candidate(draw) for _ in repeat(None)),
            count,
            held_out,
            key=lambda story: story.calculation,
            task="task=word_problems",
            options=f"steps={self.steps}, max_number={self.max_number}; widen one",
        )

    def _candidate(self, draw: random.Random) -> Story:
        return random_story(draw, draw.choice(self.steps), draw.choice(self.distractors), self.max_number)


def random_story(draw: random.Random, steps: int, distractors: int, max_number: int) -> Story:
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
    return Story(chain, " ".join(sentences))


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
