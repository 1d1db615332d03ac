"""task=shape: prompts and completions of exact lengths and drawn rewards, to measure speed and memory of steps.

Nothing can be learned from it: no reward depends on what was written. What a step costs depends on lengths, and on
whether its completions are trained on at all: where all of a group earn the same, their advantage is 0 and the backward
pass is left out. So the rewards of every group differ. Left out: held-out questions and demonstrations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from qerl_bench.checks import ConfigError, require
from qerl_bench.records import Demonstration, Prompt, Reward, Rollout
from qerl_bench.seeding import derive

if TYPE_CHECKING:
    from qerl_bench.config import Experiment

LENGTHS = ("fixed", "geometric")
IDS = 256  # prompts are made of token ids below it, which every vocabulary has
NAMES = ("prompt_tokens", "completion_tokens", "max_completion_tokens", "group_size")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The fields of conf/task/shape.yaml. Prompts are token ids, so no tokenizer or chat template changes them."""

    name: str
    prompt_tokens: int
    lengths: str
    completion_tokens: int
    max_completion_tokens: int
    group_size: int

    def __post_init__(self) -> None:
        for key in NAMES:
            value = getattr(self, key)
            require(
                type(value) is int and value >= 1, f"task.{key} must be a whole number of at least 1, got {value!r}"
            )
        require(self.lengths in LENGTHS, f"task.lengths must be one of {', '.join(LENGTHS)}, got {self.lengths!r}")
        require(
            self.completion_tokens <= self.max_completion_tokens,
            f"task.completion_tokens={self.completion_tokens} is above task.max_completion_tokens="
            f"{self.max_completion_tokens}, the limit; make that larger",
        )

    def check_with(self, experiment: Experiment) -> None:
        require(
            experiment.algo.on_policy,
            f"task=shape has no demonstrations to imitate, which algo={experiment.algo.name} reads; use an on-policy "
            "algorithm such as algo=grpo",
        )
        require(
            experiment.eval.name == "none",
            f"task=shape has no held-out questions, and eval={experiment.eval.name} asks some; use eval=none",
        )
        require(
            self.group_size == experiment.rollout.group_size,
            f"task.group_size={self.group_size} must be rollout.group_size={experiment.rollout.group_size}, which it "
            "takes by default; leave it out",
        )

    def check(self) -> None:
        """Needs nothing."""

    def train_prompts(self, step: int, count: int, seed: int) -> list[Prompt]:
        return [self._prompt(seed, step, number) for number in range(count)]

    def normalised(self, question: str) -> str:
        """The question itself: prompts are numbers, and no two are copies."""
        return question

    def stored_prompts(self) -> list[Prompt]:
        """None: generated as they are needed."""
        return []

    def eval_prompts(self, count: int | None) -> list[Prompt]:
        raise ConfigError("task=shape has no held-out questions: nothing can be learned from it. Use eval=none")

    def demonstrations(self, step: int, count: int, seed: int) -> list[Demonstration]:
        raise ConfigError(
            "task=shape has no worked solutions to imitate; use an algorithm other than sft, and for a quantizer "
            "quantizer.calibration.file=TEXT"
        )

    def warm_start_overrides(self) -> list[str]:
        """Nothing to teach model=tiny."""
        return []

    def rewards(self, rollouts: list[Rollout]) -> list[Reward]:
        """What was drawn for each sample of a prompt, and stands in its `answer` as a digit, 0 or 1."""
        drawn = [rollout.prompt.answer[rollout.sample] == "1" for rollout in rollouts]
        return [Reward(total=float(one), correct=one) for one in drawn]

    def reward(self, prompt: Prompt, completion: str) -> Reward:
        raise ConfigError("task=shape cannot judge a completion: its rewards are drawn. Judge with another task")

    def _prompt(self, seed: int, step: int, number: int) -> Prompt:
        """Prompt `number` of a step: its ids, the length of each completion, and what each earns, half of them 1."""
        place = (seed, "shape", step, number)
        earned = ["1"] * (self.group_size // 2) + ["0"] * (self.group_size - self.group_size // 2)
        Random(derive(*place, "reward")).shuffle(earned)
        return Prompt(
            id=f"shape/train/{seed}-{step}-{number}",
            messages=(),
            answer="".join(earned),
            token_ids=tuple(Random(derive(*place, "prompt")).choices(range(IDS), k=self.prompt_tokens)),
            new_tokens=tuple(self._length(derive(*place, "length", sample)) for sample in range(self.group_size)),
        )

    def _length(self, seed: int) -> int:
        """A geometric length is 1 or more, of mean `completion_tokens` before it is cut at the limit."""
        if self.lengths == "fixed" or self.completion_tokens == 1:
            return self.completion_tokens
        going_on = 1 - 1 / self.completion_tokens
        drawn = 1 + math.floor(math.log(1 - Random(seed).random()) / math.log(going_on))
        return min(drawn, self.max_completion_tokens)
