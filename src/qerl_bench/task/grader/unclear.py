"""LaTeX answers that no reader can be sure of: refused before math-verify, which reads them leniently.

Spaces between digits in groups of three are thousands separators. An answer with an ellipsis or an approximation is
right as the text of the gold answer alone. Unclear are words that change a number, and other brackets around lists or
another base than in the gold answer.
"""

from __future__ import annotations

import re
from collections import Counter

from qerl_bench.task.grader.numbers import value_words

_SPACE = r"(?:\\[,;:!> ]|\\(?:thin|med|thick)space\b ?|\{,\}|\{\\,\}|[~\s])"
_GROUPS = re.compile(rf"(?<![0-9.,])[1-9][0-9]{{0,2}}(?:{_SPACE}[0-9]{{3}})+(?!{_SPACE}*[0-9])")
_SPACES = re.compile(_SPACE)
_ELLIPSIS = re.compile(r"\\[lcdi]?dots[cbmio]?(?![a-zA-Z])|\.\.|\u2026|\u22ef")
_APPROXIMATION = re.compile(
    r"\\(?:thick)?approx(?:eq)?(?![a-zA-Z])|\\(?:thick)?sim(?:eq)?(?![a-zA-Z])|\\(?:cong|doteq|lesssim|gtrsim)(?![a-zA-Z])"
    r"|~=|\u2248|\u2243|\u2245|\u223c"
)
_BASE = re.compile(r"[0-9]\s*_\s*\{?\s*(?:\\text(?:bf|rm)?\{)?([0-9]+|[a-z]+)")
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])|\\[{}|]|\s")


def joined(text: str) -> str:
    """`text` with the digits of each number that is written in groups of three side by side: 10\\,000 is 10000."""
    return _GROUPS.sub(lambda match: _SPACES.sub("", match[0]), text)


def is_left_open(text: str) -> bool:
    """Whether the reader has to fill in the dots, or `text` is about something."""
    return bool(_ELLIPSIS.search(text) or _APPROXIMATION.search(text))


def same_text(left: str, right: str) -> bool:
    """Whether two texts differ in layout alone; a space between digits is more than that."""
    return _layout_free(left) == _layout_free(right)


def _layout_free(text: str) -> str:
    return re.sub(r"(?<![0-9]) | (?![0-9])", "", re.sub(rf"\\(?:left|right)(?![a-zA-Z])|{_SPACE}", " ", text))


def is_unclear(gold: str, answer: str) -> bool:
    """Whether `answer` may mean something else than what math-verify reads."""
    new_bases = {*_BASE.findall(answer)} - {*_BASE.findall(gold)}
    return bool(new_bases) or value_words(answer) != value_words(gold) or not _same_brackets(gold, answer)


def _same_brackets(gold: str, answer: str) -> bool:
    """Whether lists are in the same brackets: (1,2] is no (1,2). Without any, round ones may stand around a list."""
    wanted, given = _brackets(gold), _brackets(answer)
    return wanted == given or not given or (not wanted and {*given} == {"()"})


def _brackets(text: str) -> Counter[str]:
    """How often which brackets stand around a list, such as "(]"."""
    found: Counter[str] = Counter()
    opened: list[tuple[str, bool]] = []  # each with whether a comma was in it
    for letter in _SIZES.sub("", text):
        if letter in "([":
            opened.append((letter, False))
        elif letter in ",;" and opened:
            opened[-1] = (opened[-1][0], True)
        elif letter in ")]" and opened:
            start, is_list = opened.pop()
            found[start + letter] += is_list
    return +found
