"""task=shape: prompts and completions of exact lengths with random rewards, to measure the speed and memory of steps.

Nothing can be learned from it: rewards do not depend on the completions. The cost of a step depends on lengths and on
whether a group has unequal rewards: if they are equal, its advantages are 0 and its backward pass is skipped. So every
group gets unequal rewards. Left out: held-out questions and demonstrations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from qerl_bench.algo.base import Algorithm
from qerl_bench.task.base import TaskBase
from qerl_bench.task.prompt_task import no_demonstrations
from qerl_core.checks import ConfigError, check_fields, count, one_of, require
from qerl_core.records import Demonstration, Prompt, Reward, Rollout
from qerl_core.seeding import derive

LENGTHS = ("fixed", "geometric")
IDS = 256  # prompts use token ids below this, which every vocabulary has


@dataclass(frozen=True, kw_only=True)
class Shape(TaskBase):
    """The fields of conf/task/shape.yaml. Prompts are token ids, so no tokenizer or chat template changes them."""

    name: str
    prompt_tokens: int
    lengths: str
    completion_tokens: int
    max_completion_tokens: int
    group_size: int

    def __post_init__(self) -> None:
        check_fields(
            self,
            "task",
            prompt_tokens=count(),
            completion_tokens=count(),
            max_completion_tokens=count(),
            group_size=count(),
            lengths=one_of(*LENGTHS),
        )
        require(
            self.completion_tokens <= self.max_completion_tokens,
            f"task.completion_tokens={self.completion_tokens} is above task.max_completion_tokens="
            f"{self.max_completion_tokens}, the limit; make that larger",
        )

    def check_with(self, algo: Algorithm, eval_name: str, group_size: int) -> None:
        require(
            algo.on_policy,
            f"task=shape has no demonstrations, which algo={algo.name} imitates; use an on-policy algorithm such as "
            "algo=grpo",
        )
        require(
            eval_name == "none", f"task=shape has no held-out questions, which eval={eval_name} needs; use eval=none"
        )
        require(
            self.group_size == group_size,
            f"task.group_size={self.group_size} must equal rollout.group_size={group_size}, its default; leave it out",
        )

    def train_prompts(self, step: int, count: int, seed: int) -> list[Prompt]:
        return [self._prompt(seed, step, number) for number in range(count)]

    def normalize(self, question: str) -> str:
        """The question itself, which is empty: prompts are token ids."""
        return question

    def eval_prompts(self, count: int | None) -> list[Prompt]:
        raise ConfigError("task=shape has no held-out questions: nothing can be learned from it. Use eval=none")

    def demonstrations(self, step: int, count: int, seed: int) -> list[Demonstration]:
        raise no_demonstrations("shape")

    def rewards(self, rollouts: list[Rollout]) -> list[Reward]:
        """The random rewards, 0 or 1, which the prompt's `answer` holds as one digit for each sample."""
        correct = [rollout.prompt.answer[rollout.sample] == "1" for rollout in rollouts]
        return [Reward(total=float(is_correct), correct=is_correct) for is_correct in correct]

    def reward(self, prompt: Prompt, completion: str, finished: bool = True) -> Reward:
        raise ConfigError("task=shape cannot grade a completion: its rewards are random. Grade with another task")

    def _prompt(self, seed: int, step: int, number: int) -> Prompt:
        """Prompt `number` of a step: token ids, the length of each completion, and each reward, half of them 1."""
        key = (seed, "shape", step, number)
        rewards = ["1"] * (self.group_size // 2) + ["0"] * (self.group_size - self.group_size // 2)
        Random(derive(*key, "reward")).shuffle(rewards)
        return Prompt(
            id=f"shape/train/{seed}-{step}-{number}",
            messages=(),
            answer="".join(rewards),
            token_ids=tuple(Random(derive(*key, "prompt")).choices(range(IDS), k=self.prompt_tokens)),
            new_tokens=tuple(self._length(derive(*key, "length", sample)) for sample in range(self.group_size)),
        )

    def _length(self, seed: int) -> int:
        """A geometric length is at least 1 and has mean `completion_tokens` before it is cut at the limit."""
        if self.lengths == "fixed" or self.completion_tokens == 1:
            return self.completion_tokens
        continue_probability = 1 - 1 / self.completion_tokens
        length = 1 + math.floor(math.log(1 - Random(seed).random()) / math.log(continue_probability))
        return min(length, self.max_completion_tokens)
