"""LaTeX answers that no reader can be sure of: refused before math-verify, which reads them leniently.

Spaces between digits in groups of three are thousands separators. An answer with an ellipsis or an approximation is
right as the text of the gold answer alone. So is what is unclear: words that change a number, text and commands that
the gold answer has not, a list where it has none, other brackets around lists, and another base.
"""

from __future__ import annotations

import re
from collections import Counter

from qerl_bench.task.grader.numbers import value_words
from qerl_bench.task.grader.units import TEXT, Answer

_SPACE = r"(?:\\[,;:!> ]|\\(?:thin|med|thick)space\b ?|\{,\}|\{\\,\}|[~\s])"
_GROUPS = re.compile(rf"(?<![0-9.,])[1-9][0-9]{{0,2}}(?:{_SPACE}[0-9]{{3}})+(?!{_SPACE}*[0-9])")
_SPACES = re.compile(_SPACE)
_ELLIPSIS = re.compile(r"\\[lcdi]?dots[cbmio]?(?![a-zA-Z])|\.\.|\u2026|\u22ef")
_APPROXIMATION = re.compile(
    r"\\(?:thick)?approx(?:eq)?(?![a-zA-Z])|\\(?:thick)?sim(?:eq)?(?![a-zA-Z])|\\(?:cong|doteq|lesssim|gtrsim)(?![a-zA-Z])"
    r"|~=|\u2248|\u2243|\u2245|\u223c"
)
_BASE = re.compile(r"[0-9]\s*_\s*\{?\s*(?:\\text(?:bf|rm)?\{)?([0-9]+|[a-z]+)")
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])|\\\||\s")
_BRACKET = re.compile(r"\\[{}]|[()\[\],;]")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_MARK = re.compile(r"\\text\s*\{\s*\}|[\"'$?&#@]")  # what math-verify leaves out
_TURNED = re.compile(r"\\circ\s*\}?\s*[0-9a-zA-Z({]")  # 90°1
_COMMANDS = """
    frac dfrac tfrac cfrac sqrt cdot times div pm mp ast star pi infty cup cap in notin subset subseteq setminus
    emptyset varnothing le leq leqslant ge geq geqslant lt gt ne neq equiv to left right bigl bigr Bigl Bigr big
    Big bigg Bigg text mathrm operatorname mathbb mathcal mathfrak begin end pmatrix bmatrix matrix binom dbinom
    tbinom choose overline bar vec overrightarrow mid vert lvert rvert lfloor rfloor lceil rceil langle rangle
    lbrace rbrace quad qquad thinspace sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp
    lim sum prod int max min gcd det mod pmod bmod circ angle triangle prime alpha beta gamma delta epsilon
    varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon phi varphi chi psi omega
    Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega land wedge
"""
_KNOWN = frozenset(_COMMANDS.split())


def join_digit_groups(text: str) -> str:
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


def is_unclear(gold: Answer, answer: Answer) -> bool:
    """Whether `answer` may mean something else than what math-verify reads."""
    asked, text = gold.text, answer.text
    return (
        bool({*_BASE.findall(text)} - {*_BASE.findall(asked)})
        or value_words(text) != value_words(asked)
        or any(_counts(found, text) - _counts(found, asked) for found in (TEXT, _COMMAND))
        or any(_counts(found, text) != _counts(found, asked) for found in (_MARK, _TURNED))
        or (_is_list(text) and not _is_list(asked))
        or not _same_brackets(gold, answer)
    )


def _counts(pattern: re.Pattern[str], text: str) -> Counter[str]:
    return Counter(found for found in pattern.findall(text) if found not in _KNOWN)


def _is_list(text: str) -> bool:
    """Whether `text` gives several values, in brackets or not."""
    return re.search(r"[,;]|\\pm(?![a-zA-Z])|matrix|\\\\", _THOUSANDS.sub("", text)) is not None


def _same_brackets(gold: Answer, answer: Answer) -> bool:
    """Whether lists are in the same brackets: (1,2] is no (1,2), and {1,2} is no pair. Round ones may be left out if
    nothing links the values, braces always; either may stand around a list that has none."""
    wanted, given = _brackets(gold.text), _brackets(answer.text)
    if not given:
        return not wanted or [*wanted] == ["{}"] or ([*wanted] == ["()"] and not answer.linked)
    return wanted == given or (not wanted and [*given] in (["{}"], ["()"]))


def is_pair_of_list(gold: str, answer: str) -> bool:
    """Whether `answer` is in round brackets, so in an order, and `gold` a list without any."""
    return [*_brackets(answer)] == ["()"] and not _brackets(gold)


def _brackets(text: str) -> Counter[str]:
    """How often which brackets stand around a list, such as "(]"."""
    found: Counter[str] = Counter()
    opened: list[tuple[str, bool]] = []  # each with whether a comma was in it
    for sign in _BRACKET.findall(_SIZES.sub("", text)):
        letter = sign.strip("\\")
        if sign in ("(", "[", "\\{"):
            opened.append((letter, False))
        elif sign in ",;" and opened:
            opened[-1] = (opened[-1][0], True)
        elif sign in (")", "]", "\\}") and opened:
            start, is_list = opened.pop()
            found[start + letter] += is_list
    return +found
