"""Reads the last number of a completion, wherever it stands: lenient accuracy.

As lm-eval's flexible extract, which takes an ellipsis or $$ behind it for the number. Evaluations show it beside the
strict accuracy of `extract.py`: what only the strict one gains is the answer format. No reward uses it, because it is
right by chance too often. Of an answer in words, the last words of a completion.
"""

from __future__ import annotations

import re

from qerl_bench.task.grader.characters import words_of
from qerl_bench.task.grader.numbers import parse_number

# A minus behind a digit, letter or bracket subtracts; a comma separates well-formed thousands only.
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z)\]}])[-\u2212])?[$€£¥₹]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


def last_number_is(gold: str, completion: str, finished: bool) -> bool | None:
    """Whether the last number of a finished completion equals `gold`; None if `gold` is no number.

    False for one that was cut off: its last number is of the way to an answer.
    """
    wanted = parse_number(gold)
    if wanted is None:
        return None
    numbers = _NUMBER.findall(completion.replace("{,}", ",").replace(",\\!", ",")) if finished else []
    return bool(numbers) and parse_number(numbers[-1]) == wanted


def last_words_are(gold: str, completion: str, finished: bool) -> bool | None:
    """Whether a finished completion ends with the words of `gold`, whatever their case and punctuation; None if it has
    none.
    """
    wanted = words_of(gold)
    return finished and f" {words_of(completion)}".endswith(f" {wanted}") if wanted else None
