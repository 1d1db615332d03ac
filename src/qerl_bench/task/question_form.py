"""The form in which copies of a question are equal: what carries a value stays, layout and sentence punctuation go.

`5+2` and `5^2` are two questions, `What is 2+2?` and `what is 2 + 2` one. Left out: questions that mean the same in
other words, and LaTeX beyond a few symbols.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

KEPT = 2**15  # questions whose form a process keeps: a run and its check, or the points of a sweep, ask for the same
_TAG = re.compile(r"</?(?:b|i|u|em|strong|p|br|span|div|code|sub)\s*/?>", re.IGNORECASE)
_SUPERSCRIPT = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+|<sup>")
_FRACTION = re.compile(r"(?<=\d)(?=[¼½¾⅐-⅞])")  # 3½ is not 31/2
_COMMAND = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[,;:!\s()\[\]]|~")  # layout of LaTeX
_SAME = {  # one character for each operation
    r"\\(?:times|cdot)(?![A-Za-z])|[×·⋅∙]": "*",
    r"\\div(?![A-Za-z])|[÷⁄∕]": "/",
    r"[−–‐‑]": "-",
    r"\\leq?(?![A-Za-z])": "≤",
    r"\\geq?(?![A-Za-z])": "≥",
    r"\\neq?(?![A-Za-z])": "≠",
    r"\\pm(?![A-Za-z])": "±",
}
_PART = re.compile(r"(?P<number>\d+(?:[.:]\d+|,\d{3}(?!\d))*|(?<![\w.])\.\d+)|(?P<word>\\?[^\W\d_]+)|(?P<mark>\S)")
_OPENING, _CLOSING = "([{", ")]}"
_LAYOUT_RUN = 3  # so many of one mark in a row draw a line
_FORMULA_WORD = 3  # letters, at most, of a word between brackets that belong to a formula


_Part = tuple[str, str]  # a text, and what it is: number, word, command, sign (of a value), bracket


def normalize_question(text: str, instructions: Iterable[str] = ()) -> str:
    """`text` in lower case, a space between words, numbers, signs and brackets of formulas.

    `instructions` at its end are removed; they are not part of the question.
    """
    form = _form(text)
    for line in instructions:
        form = form.removesuffix(f" {normalize_question(line)}")
    return form


@lru_cache(KEPT)
def _form(text: str) -> str:
    return " ".join(_kept_brackets(_parts(_plain(text))))


def _plain(text: str) -> str:
    """`text` with one character for each operation, without markup."""
    text = _SUPERSCRIPT.sub(lambda found: f"^{found[0].removeprefix('<sup>')}", _FRACTION.sub(" ", text))
    text = _COMMAND.sub(" ", _TAG.sub(" ", text.replace("</sup>", " ")))
    text = unicodedata.normalize("NFKC", text).casefold()
    for pattern, sign in _SAME.items():
        text = re.sub(pattern, sign, text)
    return text


def _parts(text: str) -> list[_Part]:
    parts = []
    for found in _PART.finditer(text):
        kind, part = str(found.lastgroup), found[0]
        if kind == "mark":
            if part in _OPENING + _CLOSING:
                kind = "bracket"
            elif _is_sign(part, text, found.start()):
                kind = "sign"
            else:
                continue
        elif part.startswith("\\"):
            kind, part = "command", part[1:]
        parts.append((part, kind))
    return parts


def _is_sign(mark: str, text: str, at: int) -> bool:
    """Whether the character `mark` at `at` carries a value, rather than layout or the sense of a sentence."""
    before, behind = text[:at], text[at + 1 :]
    left, right = before.rstrip(), behind.lstrip()
    run = len(left) - len(left.rstrip(mark)) + 1 + len(right) - len(right.lstrip(mark))
    begins_line = before.rpartition("\n")[2].strip() == ""
    if run >= _LAYOUT_RUN or (begins_line and before.strip() != "" and behind[:1].isspace()):
        return False  # a line, a bullet, a quotation
    if mark == "-":
        return _begins_value(right)
    if mark in "*/":
        even = (before == left) == (behind == right)  # not **bold**
        return even and _ends_value(left) and _begins_value(right)
    if mark == "!":
        return _ends_value(before)
    if mark == "%":
        return left.rstrip("\\")[-1:].isdigit()
    if mark == "|":
        return _ends_value(before) or _begins_value(behind)
    return mark == "^" or (unicodedata.category(mark) == "Sm")


def _begins_value(text: str) -> bool:
    return re.match(r"\d|\.\d|[([{\\√|+$-]|[^\W\d_](?![^\W\d_])", text) is not None


def _ends_value(text: str) -> bool:
    return re.search(r"(?:\d|[)\]}!%|]|(?<![^\W\d_])[^\W\d_])$", text) is not None


def _kept_brackets(parts: list[_Part]) -> list[str]:
    """The texts of `parts` without brackets around a single one, or around words: only those of formulas and intervals
    change a value."""
    opened: list[int] = []
    kept: set[int] = set()
    for number, (text, kind) in enumerate(parts):
        if kind != "bracket":
            continue
        if text in _OPENING:
            opened.append(number)
        elif opened:
            start = opened.pop()
            inside = [part for part in parts[start + 1 : number] if part[1] != "bracket"]
            kinds = {kind for _, kind in inside}
            formula = all(kind != "word" or len(text) <= _FORMULA_WORD for text, kind in inside)
            if len(inside) > 1 and formula and ("sign" in kinds or kinds == {"number"}):
                kept |= {start, number}
    chosen = (text for number, (text, kind) in enumerate(parts) if kind != "bracket" or number in kept)
    return [{"{": "(", "}": ")"}.get(text, text) for text in chosen]
