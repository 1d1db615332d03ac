"""reward=FILE.py: a plain function in a file of one's own says what training rewards.

    def reward(completions, **columns):
        return [float(correct) - len(text) / 1000 for text, correct in zip(completions, columns["correct"])]

Completions are still graded, so that `accuracy` and the parts of the reward stay true. Runs that train with the file
execute it, and nothing that only reads or evaluates them does.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qerl_bench.algo.base import Algorithm
from qerl_bench.reward.base import refuse_demonstrations
from qerl_bench.task.base import Task
from qerl_bench.task.graded import all_checked
from qerl_core.checks import ConfigError, TrainingStopped, check_fields, optional, require, text
from qerl_core.options.user_options import load_file
from qerl_core.records import Prompt, Reward, Rollout

FORM = "def {}(completions, **columns), which returns one number for each completion"
CUT = "It is 3.14 or"  # a completion that the token limit ended


@dataclass(frozen=True, kw_only=True)
class FunctionReward:
    """`function` of `file`, called with the completions of a step as texts, or on several GPUs with a share of them.

    The columns have as many entries: `prompts` (texts, without chat template), `question`, `answer` (the gold one),
    `id` (of the question), `correct` (what the task's grader says), `finished` (false if cut off at the token limit).
    """

    name: str
    file: str | None
    function: str

    def __post_init__(self) -> None:
        check_fields(self, "reward", file=optional(text), function=text)

    def check_with(self, algo: Algorithm) -> None:
        refuse_demonstrations("reward=function", algo)

    def check(self, task: Task) -> None:
        """Call the function on three completions of a question. Raises ConfigError, with the line, if it cannot be."""
        prompt = task.train_prompts(1, 1, seed=0)[0]
        tried = [_rollout(prompt, said) for said in ("", prompt.answer, CUT)]
        try:
            all_checked(self.rewards(task, tried, seed=0), self._where, tried)
        except (ConfigError, TrainingStopped) as error:
            raise ConfigError(f"{error}. Write {FORM.format(self.function)}") from error
        except Exception as error:  # whatever a user's function raises
            lines = [
                frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self._path
            ]
            at = f", line {lines[-1]}" if lines else ""
            raise ConfigError(
                f"{self._where}{at}: {type(error).__name__}: {error}, when tried on three completions, one of them "
                f"empty. Write {FORM.format(self.function)}; the columns are {', '.join(_columns(tried, []))}"
            ) from error

    def rewards(self, task: Task, rollouts: list[Rollout], seed: int) -> list[Reward]:
        graded = task.rewards(rollouts)
        values = self._callable()([rollout.text for rollout in rollouts], **_columns(rollouts, graded))
        try:
            numbers = [*values]
        except TypeError as error:
            raise TrainingStopped(f"{self._where} returned {values!r} in place of a list of numbers") from error
        if len(numbers) != len(rollouts):
            raise TrainingStopped(f"{self._where} returned {len(numbers)} numbers for {len(rollouts)} completions")
        return [replace(reward, total=number) for reward, number in zip(graded, numbers, strict=True)]

    @property
    def _where(self) -> str:
        return f"reward.file={self.file}, {self.function}"

    @property
    def _path(self) -> str:
        return str(Path(self.file or "").absolute())

    def _callable(self) -> Callable[..., Any]:
        require(self.file is not None, f"reward=function needs reward.file=FILE.py with {FORM.format(self.function)}")
        module = load_file("reward.file", Path(self._path))
        found = getattr(module, self.function, None)
        has = [name for name, one in vars(module).items() if callable(one) and not name.startswith("_")]
        require(
            callable(found),
            f"{self.file} has no function {self.function}; write {FORM.format(self.function)}, or set reward.function "
            f"to one that it has: {', '.join(has) or 'none'}",
        )
        assert found is not None
        return found


def _columns(rollouts: Sequence[Rollout], graded: Sequence[Reward]) -> dict[str, list[Any]]:
    prompts = [rollout.prompt for rollout in rollouts]
    return {
        "prompts": ["\n".join(message["content"] for message in prompt.messages) for prompt in prompts],
        "question": [prompt.question for prompt in prompts],
        "answer": [prompt.answer for prompt in prompts],
        "id": [prompt.id for prompt in prompts],
        "correct": [reward.correct for reward in graded],
        "finished": [rollout.finished for rollout in rollouts],
    }


def _rollout(prompt: Prompt, said: str) -> Rollout:
    """A completion that nobody sampled."""
    return Rollout(
        prompt=prompt, sample=0, prompt_ids=[], token_ids=[], logprobs=[], entropies=[], text=said, finished=said != CUT
    )
