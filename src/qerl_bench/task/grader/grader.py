"""The reward of every task with a gold answer: is the answer right, is the completion in its format, what is it worth.

Each is a column of its own wherever rewards are written: `correct` and `format`, each 0 or 1, and their weighted sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from qerl_bench.checks import require, require_package
from qerl_bench.records import Reward
from qerl_bench.task.grader.extract import ANSWER_FORMATS, extract, well_formed
from qerl_bench.task.grader.latex import compare
from qerl_bench.task.grader.numbers import parse_number

EQUALITIES = ("numeric", "math")


class Judged(Protocol):
    """What a task's YAML says about its rewards."""

    @property
    def answer_format(self) -> str: ...

    @property
    def correct_weight(self) -> float: ...

    @property
    def format_weight(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Judge:
    """How answers are found (`answer_format`), what makes two of them the same (`equality`), and what they earn.

    numeric: both state one number, exactly the same one (task/grader/numbers.py). math: the same number, or LaTeX that
    math-verify finds equal within its time limit (task/grader/latex.py).
    """

    answer_format: str
    equality: str
    correct_weight: float
    format_weight: float

    def __post_init__(self) -> None:
        require(
            self.answer_format in ANSWER_FORMATS,
            f"task.answer_format must be one of {', '.join(ANSWER_FORMATS)}, got {self.answer_format!r}",
        )
        require(
            self.equality in EQUALITIES,
            f"task.equality must be one of {', '.join(EQUALITIES)}, got {self.equality!r}",
        )
        require(
            0 < self.correct_weight < float("inf") and 0 <= self.format_weight < float("inf"),
            "task needs a finite correct_weight > 0 and format_weight >= 0, "
            f"got correct_weight={self.correct_weight}, format_weight={self.format_weight}",
        )

    @classmethod
    def of(cls, task: Judged, equality: str) -> Judge:
        """The judge that a task's options describe."""
        return cls(
            answer_format=task.answer_format,
            equality=equality,
            correct_weight=task.correct_weight,
            format_weight=task.format_weight,
        )

    def check(self) -> None:
        """Raise ConfigError if the package that compares LaTeX is missing."""
        if self.equality == "math":
            require_package("math_verify", "task.equality=math", "math")

    def readable(self, gold: str) -> bool:
        """Whether any answer could equal `gold`: its own text, at least, must."""
        return self._compared(gold, gold.strip())[0]

    def reward(self, gold: str, completion: str) -> Reward:
        """correct_weight for the right answer + format_weight for a well-formed completion. Never raises on any text.

        `answer` of the reward is the answer in a canonical form, by which answers of several samples can be counted.
        """
        text = extract(completion, self.answer_format)
        correct, answer = (False, None) if text is None else self._compared(gold, text)
        formed = well_formed(completion, self.answer_format)
        return Reward(
            total=self.correct_weight * correct + self.format_weight * formed,
            correct=correct,
            parts={"correct": float(correct), "format": float(formed)},
            answer=answer,
        )

    def _compared(self, gold: str, text: str) -> tuple[bool, str]:
        if self.equality == "math":
            return compare(gold, text)
        number = parse_number(text)
        if number is None:
            return False, text
        return number == parse_number(gold), str(number)
