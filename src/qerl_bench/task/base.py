"""What a task is: prompts, a reward, and demonstrations for a warm start.

A task spec is a frozen dataclass named by `_target_` in conf/task/*.yaml. It validates its own fields, imports no
torch, and draws everything from explicit seeds, so any step's prompts can be recomputed after a resume.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from qerl_bench.records import Demonstration, Prompt, Reward, Rollout

if TYPE_CHECKING:
    from qerl_bench.config import Experiment


class Task(Protocol):
    """Training prompts, held-out prompts, and the reward that judges a completion."""

    @property
    def name(self) -> str: ...

    @property
    def max_completion_tokens(self) -> int: ...

    def check_with(self, experiment: Experiment) -> None:
        """Raise ConfigError if `experiment` needs what this task has not. Called while it is built; imports no torch."""
        ...

    def check(self) -> None:
        """Read whatever the task needs and raise ConfigError if it is missing or malformed; called before training."""

    def train_prompts(self, step: int, count: int, seed: int) -> list[Prompt]:
        """The `count` prompts of optimiser step `step`, counted from 1: a pure function of its arguments."""
        ...

    def normalised(self, question: str) -> str:
        """The text by which a question is recognised: equal for copies of it that differ in layout alone."""
        ...

    def stored_prompts(self) -> list[Prompt]:
        """Every prompt that training may draw, where questions are kept in a file; none where they are generated."""
        ...

    def eval_prompts(self, count: int | None) -> list[Prompt]:
        """The first `count` held-out prompts (None: all), always the same ones; none of them is ever trained on."""
        ...

    def demonstrations(self, step: int, count: int, seed: int) -> list[Demonstration]:
        """Prompts of the training split with completions to imitate, for algo=sft; a pure function of its arguments."""
        ...

    def warm_start_overrides(self) -> list[str]:
        """The command-line words with which the warm start of model=tiny teaches this task; none: it need not."""
        ...

    def rewards(self, rollouts: list[Rollout]) -> list[Reward]:
        """Judge the completions of training, one reward for each."""
        ...

    def reward(self, prompt: Prompt, completion: str) -> Reward:
        """Judge one decoded completion (stop token removed)."""
        ...
