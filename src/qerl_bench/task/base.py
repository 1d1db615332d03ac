"""The Task protocol: prompts, a reward for completions, and demonstrations to imitate.

A task spec is a frozen dataclass named by `_target_` in conf/task/*.yaml. It validates its fields, imports no torch,
and takes an explicit seed for every draw, so the prompts of any step can be recomputed after a resume.
"""

from __future__ import annotations

from typing import Protocol

from qerl_bench.algo.base import Algorithm
from qerl_bench.task.question_form import normalize_question
from qerl_core.checks import require
from qerl_core.records import Demonstration, Prompt, Reward, Rollout
from qerl_core.seeding import derive


class TaskBase:
    """What holds for a task that says nothing else: its questions are generated as they are needed, by `_prompts`."""

    held_out_questions = 1024  # if all are asked for

    def _prompts(self, split: str, seed: int, count: int) -> list[Prompt]:
        """`count` different prompts of the split "train" or "test", a function of the seed."""
        raise NotImplementedError

    def train_prompts(self, step: int, count: int, seed: int) -> list[Prompt]:
        return self._prompts("train", derive(seed, "train", step), count)

    def eval_prompts(self, count: int | None) -> list[Prompt]:
        return self._prompts("test", derive("held-out"), self.held_out_questions if count is None else count)

    def check_with(self, algo: Algorithm, eval_name: str, group_size: int) -> None:
        """Works with every algorithm, evaluation and group size."""

    def check(self) -> None:
        """Needs no data."""

    def normalize(self, question: str) -> str:
        """The question without layout and sentence punctuation."""
        return normalize_question(question)

    def stored_prompts(self) -> list[Prompt]:
        return []

    def warm_start_overrides(self) -> list[str]:
        return []

    def demonstrations(self, step: int, count: int, seed: int) -> list[Demonstration]:
        raise NotImplementedError

    def calibration_demonstrations(self, count: int, seed: int) -> list[Demonstration]:
        return self.demonstrations(0, count, seed)

    def rewards(self, rollouts: list[Rollout]) -> list[Reward]:
        return [self.reward(rollout.prompt, rollout.text, finished=rollout.finished) for rollout in rollouts]

    def reward(self, prompt: Prompt, completion: str, finished: bool = True) -> Reward:
        raise NotImplementedError


class Task(Protocol):
    """Training prompts, held-out prompts, and the reward of a completion."""

    @property
    def name(self) -> str: ...

    @property
    def max_completion_tokens(self) -> int: ...

    def check_with(self, algo: Algorithm, eval_name: str, group_size: int) -> None:
        """Raise ConfigError if the task cannot serve these options. Called when a config is built; imports no torch."""
        ...

    def check(self) -> None:
        """Load all data and raise ConfigError if any is missing or malformed. Called before training."""

    def train_prompts(self, step: int, count: int, seed: int) -> list[Prompt]:
        """The `count` prompts of training step `step` (from 1): a pure function of its arguments."""
        ...

    def normalize(self, question: str) -> str:
        """A form of the question in which copies that differ only in layout are equal."""
        ...

    def stored_prompts(self) -> list[Prompt]:
        """Every training prompt of a task that reads a data file; empty for a task that generates its questions."""
        ...

    def eval_prompts(self, count: int | None) -> list[Prompt]:
        """The first `count` held-out prompts (None: all). They are always the same and never used for training."""
        ...

    def demonstrations(self, step: int, count: int, seed: int) -> list[Demonstration]:
        """Training prompts with completions to imitate, for algo=sft: a pure function of its arguments."""
        ...

    def calibration_demonstrations(self, count: int, seed: int) -> list[Demonstration]:
        """Training prompts with completions that a quantizer runs through the model: the same for every run.

        Raises ConfigError if the task has not so many.
        """
        ...

    def warm_start_overrides(self) -> list[str]:
        """Command-line overrides that make the warm start of model=tiny teach this task; empty: the default will do."""
        ...

    def rewards(self, rollouts: list[Rollout]) -> list[Reward]:
        """One reward for each training completion."""
        ...

    def reward(self, prompt: Prompt, completion: str, finished: bool = True) -> Reward:
        """The reward of one decoded completion, its stop token removed.

        `finished` is false for one that was cut off at the token limit: what stands at its end may have gone on.
        """
        ...


def held_out(task: Task, questions: int | None) -> list[Prompt]:
    """The first `questions` held-out prompts of `task` (None: all), of which none may be a copy of another: an error
    over questions takes them as independent. Raises ConfigError if there are too few, and for copies."""
    prompts = task.eval_prompts(questions)
    first: dict[str, str] = {}
    for prompt in prompts:
        earlier = first.setdefault(task.normalize(prompt.question), prompt.id) if prompt.question else prompt.id
        require(
            earlier == prompt.id,
            f"task={task.name} asks the same question as {earlier} and as {prompt.id}, but an error over questions "
            "takes each as a new one; let eval_prompts return it once",
        )
    return prompts
