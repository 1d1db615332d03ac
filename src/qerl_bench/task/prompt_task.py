"""PromptTask: the options shared by all tasks that ask a question in words and grade the answer."""

from __future__ import annotations

from dataclasses import dataclass

from qerl_bench.task.base import TaskBase
from qerl_bench.task.grader.grader import Grader
from qerl_bench.task.grader.last_number import last_number_is
from qerl_bench.task.prompts import PromptTemplate
from qerl_core.checks import ConfigError, check_fields, count
from qerl_core.records import Prompt, Reward


@dataclass(frozen=True, kw_only=True)
class PromptTask(TaskBase):
    """Options of every such task's YAML; task/prompts.py and task/grader/grader.py explain them."""

    name: str
    answer_format: str
    instruction: str
    template: str
    max_completion_tokens: int
    correct_weight: float
    format_weight: float

    def __post_init__(self) -> None:
        _ = self.prompt_template, self.grader  # both check their options
        check_fields(self, "task", max_completion_tokens=count())

    @property
    def prompt_template(self) -> PromptTemplate:
        return PromptTemplate(answer_format=self.answer_format, instruction=self.instruction, template=self.template)

    @property
    def grader(self) -> Grader:
        """Answers are numbers, compared exactly."""
        return self.grader_of("numeric")

    def grader_of(self, equality: str) -> Grader:
        return Grader(
            answer_format=self.answer_format,
            equality=equality,
            correct_weight=self.correct_weight,
            format_weight=self.format_weight,
        )

    def reward(self, prompt: Prompt, completion: str, finished: bool = True) -> Reward:
        return self.grader.reward(prompt.answer, completion, finished)

    def lenient(self, prompt: Prompt, completion: str, finished: bool) -> bool | None:
        """Whether the last number of a finished completion is right, wherever it stands; None without a number."""
        return last_number_is(prompt.answer, completion, finished)


def no_demonstrations(task: str) -> ConfigError:
    return ConfigError(
        f"task={task} has no worked solutions to imitate; use an algorithm other than sft, and for a quantizer "
        "quantizer.calibration.file=TEXT"
    )
