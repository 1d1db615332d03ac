"""Asks a task, or a reward option, for rewards, and takes numbers only: a user's own may return anything.

A number of numpy or torch becomes a float, and so does a truth value. NaN, infinity and what is no number end the run
before anything is learned from them, and the message names the prompt.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from numbers import Real
from typing import Any, Protocol

from qerl_core.checks import TrainingStopped, require
from qerl_core.records import Prompt, Reward, Rollout


class Judge(Protocol):
    """The part of a task that grades one completion."""

    @property
    def name(self) -> str: ...

    def reward(self, prompt: Prompt, completion: str, finished: bool = True) -> Reward: ...


def reward_of(task: Judge, prompt: Prompt, completion: str, finished: bool) -> Reward:
    """The task's reward of one completion. Raises ConfigError or TrainingStopped if that is none."""
    check_reward(task)
    return checked(task.reward(prompt, completion, finished=finished), f"task={task.name}", prompt)


def all_checked(rewards: Sequence[Reward], source: str, rollouts: Sequence[Rollout]) -> list[Reward]:
    """`checked` of the reward of each rollout. Raises TrainingStopped, too, if there are not as many."""
    if len(rewards) != len(rollouts):
        raise TrainingStopped(f"{source} gave {len(rewards)} rewards for {len(rollouts)} completions; give one each")
    return [checked(reward, source, rollout.prompt) for rollout, reward in zip(rollouts, rewards, strict=True)]


def check_reward(task: Judge) -> None:
    """Raise ConfigError if the task's `reward` cannot be told whether a completion is finished."""
    kind = type(task)
    require(
        _asks_finished(kind),
        f"task={task.name}: {kind.__qualname__}.reward does not take `finished`, which is false for a completion that "
        "was cut off. Write def reward(self, prompt, completion, finished=True), and pass it on to super().reward",
    )


def checked(reward: Reward, source: str, prompt: Prompt) -> Reward:
    """`reward` in Python's own numbers. Raises TrainingStopped, which names `source` and `prompt`, if one is none."""
    where = f"{source}, prompt {prompt.id}"
    correct = _plain(reward.correct)
    if not (isinstance(correct, Real) and correct in (0, 1)):
        raise TrainingStopped(f"{where}: `correct` of the reward is {correct!r}; return True or False")
    parts = {part: _number(value, f"{where}: the part {part} of the reward") for part, value in reward.parts.items()}
    total = _number(reward.total, f"{where}: the total of the reward")
    answer = None if reward.answer is None else str(reward.answer)
    return replace(reward, total=total, correct=bool(correct), parts=parts, answer=answer)


def _number(value: object, what: str) -> float:
    plain = _plain(value)
    number = math.nan
    with suppress(OverflowError):
        number = float(plain) if isinstance(plain, Real) else math.nan
    if not math.isfinite(number):
        raise TrainingStopped(f"{what} is {plain!r}; return a finite number")
    return number


def _plain(value: Any) -> object:
    """A scalar of numpy or torch as Python's own; anything else as it is."""
    with suppress(AttributeError, TypeError, ValueError, RuntimeError):
        return value.item()
    return value


@cache
def _asks_finished(kind: type) -> bool:
    parameters = inspect.signature(kind.reward).parameters.values()  # type: ignore[attr-defined]
    return any(parameter.name == "finished" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
