"""The Grader: whether an answer is right, whether the completion follows its format, and the reward for both.

`correct` and `format`, each 0 or 1, and their weighted sum are separate columns wherever rewards are written.
"""

from __future__ import annotations

from dataclasses import dataclass

from qerl_bench.task.grader.characters import words_of
from qerl_bench.task.grader.extract import ANSWER_FORMATS, extract, well_formed
from qerl_bench.task.grader.latex import compare
from qerl_bench.task.grader.numbers import parse_number
from qerl_core.checks import check_fields, number, one_of, positive, require_package
from qerl_core.records import Reward

EQUALITIES = ("numeric", "math", "words")


@dataclass(frozen=True, kw_only=True)
class Grader:
    """How to find answers (`answer_format`), when two answers are equal (`equality`), and what they earn.

    numeric: both state exactly the same number (task/grader/numbers.py). math: the same number, or LaTeX that
    math-verify finds equal within its time limit (task/grader/latex.py). words: the same words, whatever their case,
    spacing and punctuation.
    """

    answer_format: str
    equality: str
    correct_weight: float
    format_weight: float

    def __post_init__(self) -> None:
        check_fields(
            self,
            "task",
            answer_format=one_of(*ANSWER_FORMATS),
            equality=one_of(*EQUALITIES),
            correct_weight=positive,
            format_weight=number(0),
        )

    def check(self) -> None:
        """Raise ConfigError if the package that compares LaTeX is missing."""
        if self.equality == "math":
            require_package("math_verify", "task.equality=math", "math")

    def is_readable(self, gold: str) -> bool:
        """Whether any answer can equal `gold`, which is so if its own text does."""
        return self.equal(gold, gold.strip())

    def equal(self, gold: str, text: str) -> bool:
        """Whether the answer `text` equals `gold`."""
        return self._compare(gold, text)[0]

    def reward(self, gold: str, completion: str, finished: bool = True) -> Reward:
        """correct_weight for the right answer + format_weight for a well-formed completion. Never raises on any text.

        A completion that was cut off, which is not `finished`, has no answer where that may have gone on. The `answer`
        of the reward is in a canonical form, so that equal answers of several samples can be counted.
        """
        text = extract(completion, self.answer_format, finished)
        correct, answer = (False, None) if text is None else self._compare(gold, text)
        formed = well_formed(completion, self.answer_format, finished)
        return Reward(
            total=self.correct_weight * correct + self.format_weight * formed,
            correct=correct,
            parts={"correct": float(correct), "format": float(formed)},
            answer=answer,
        )

    def _compare(self, gold: str, text: str) -> tuple[bool, str]:
        """Whether the answer `text` equals `gold`, and its canonical form."""
        if self.equality == "math":
            return compare(gold, text)
        if self.equality == "words":
            words = words_of(text)
            return bool(words) and words == words_of(gold), words
        value = parse_number(text)
        return (False, text) if value is None else (value == parse_number(gold), str(value))
