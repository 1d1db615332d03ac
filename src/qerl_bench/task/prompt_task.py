"""What every task has in common: how it asks, how long it lets a model answer, and what its rewards weigh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.checks import ConfigError, require
from qerl_bench.records import Prompt, Reward, Rollout
from qerl_bench.task.grader.grader import Judge
from qerl_bench.task.prompts import Wording
from qerl_bench.task.sources import normalised

if TYPE_CHECKING:
    from qerl_bench.config import Experiment


@dataclass(frozen=True, kw_only=True)
class PromptedTask:
    """The fields that each task's YAML has; see task/prompts.py and task/grader/grader.py for what they mean."""

    name: str
    answer_format: str
    instruction: str
    template: str
    max_completion_tokens: int
    correct_weight: float
    format_weight: float

    def __post_init__(self) -> None:
        _ = self.wording, self.judge  # both check what they are made from
        limit = self.max_completion_tokens
        require(
            type(limit) is int and limit >= 1,
            f"task.max_completion_tokens must be a whole number of at least 1, got {limit!r}",
        )

    @property
    def wording(self) -> Wording:
        return Wording(answer_format=self.answer_format, instruction=self.instruction, template=self.template)

    @property
    def judge(self) -> Judge:
        """Numbers, compared exactly."""
        return Judge.of(self, "numeric")

    def check_with(self, experiment: Experiment) -> None:
        """Suits every experiment."""

    def normalised(self, question: str) -> str:
        """What two copies of one question have in common, whatever their spacing, punctuation or markup."""
        return normalised(question)

    def stored_prompts(self) -> list[Prompt]:
        """None: generated as they are needed."""
        return []

    def warm_start_overrides(self) -> list[str]:
        """Nothing to teach model=tiny: it knows task=arithmetic."""
        return []

    def rewards(self, rollouts: list[Rollout]) -> list[Reward]:
        return [self.reward(rollout.prompt, rollout.text) for rollout in rollouts]

    def reward(self, prompt: Prompt, completion: str) -> Reward:
        return self.judge.reward(prompt.answer, completion)


def nothing_to_imitate(task: str) -> ConfigError:
    return ConfigError(
        f"task={task} has no worked solutions to imitate; use an algorithm other than sft, and for a quantizer "
        "quantizer.calibration.file=TEXT"
    )
