"""Takes units and words off a LaTeX answer, before math-verify would: it leaves out all text behind a number, and
single letters, so that `120\\text{ or 130}` and `120c` would be 120.

Text behind a value may be a unit in words (numbers.py), and nothing else: no digit, no word that changes the value,
denies it or leaves it open. Text that is no unit stays, and is_unclear (unclear.py) asks whether the reference has it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from qerl_bench.task.grader.characters import in_latex, inside
from qerl_bench.task.grader.numbers import is_unit, parse_number

MAX_WORDS = 5  # of a unit
TEXT = re.compile(r"\\text\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_POWER = r"\s*(?:\^\s*\{?\s*[23]\s*\}?)?"
_END = re.compile(rf"{_POWER}(?:\\[,;: ]|\s)*(?=$|[,;)\]}}=]|\\right|\\\}}|\\text\{{[\s,]*(?:and|or)\s*\}})")
_SCALE = r"(?:\s*(?:\\text\{\s*[CF]\s*\}|[CF](?![a-zA-Z])))?"
_DEGREE = re.compile(rf"(?<=[0-9}}\])])\s*\^\{{\\circ\}}{_SCALE}(?=\s*(?:$|[,;)\]}}]|\\r))")
_GREEK = r"\\(?:alpha|beta|theta|phi|lambda|mu|pi|sigma|omega)"
_NAME = re.compile(rf"^(?:[a-zA-Z]|{_GREEK}|\\text\s*\{{(?! *not)[A-Za-z ]+\}})\s*=(?=[^=]*$)")
_LABEL = re.compile(r"^(?:\\text\{)?(?:the )?(?:final )?answer(?: is)?\s*:?\s*(?:\}\s*[:=]?|[:=])", re.I)
_VALUE = re.compile(r"[0-9a-zA-Z)\]}!']$")
_TEXT_LAST = re.compile(TEXT.pattern + "$")
_BARE = re.compile(rf"(?<=[0-9}}\])])(?P<space>(?:\\[,;: !]|[\s~])*)(?P<words>[a-zA-Z][a-zA-Z .'/]*){_POWER}$")
_LINKS = re.compile(r",?\s*(?:\\text\{[\s,]*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*")
_SHORT = re.compile("[ckm]m|[km]g|ft|in|lbs?|oz|hrs?|min|sec|yd|mi|m[lL]|mph|deg|rad|sq|cu|Hz|kWh?")
_SAME = {  # other names of units; one that is not here is never held against an answer
    **dict.fromkeys(("cm", "centimeter", "centimetre"), "cm"),
    **dict.fromkeys(("mm", "millimeter", "millimetre"), "mm"),
    **dict.fromkeys(("m", "meter", "metre"), "m"),
    **dict.fromkeys(("km", "kilometer", "kilometre"), "km"),
    **dict.fromkeys(("in", "inch", "inche"), "in"),
    **dict.fromkeys(("ft", "foot", "feet"), "ft"),
    **dict.fromkeys(("yd", "yard"), "yd"),
    **dict.fromkeys(("mi", "mile"), "mi"),
    **dict.fromkeys(("dollar", "$"), "$"),
    **dict.fromkeys(("percent", "%"), "%"),
    **dict.fromkeys(("degree", "deg"), "degree"),
    **{name: name for name in ("cent", "radian", "hour", "minute", "second", "day", "week", "month", "year", "am")},
    **{name: name for name in ("gram", "kilogram", "pound", "ounce", "ton", "liter", "gallon", "pm")},
}


@dataclass(frozen=True)
class Answer:
    """What an answer says: `text` in LaTeX without units, the `units` of it that have a known name, whether several
    values are `linked` by "and" or "or", and whether it is `words` alone."""

    text: str
    units: frozenset[str]
    linked: bool
    words: bool


def read(text: str, named: bool) -> Answer:
    """Takes an answer apart; never raises. If `named`, a name in front of it, such as `x =`, is a part of it."""
    text = in_latex(_without_stop(text.strip()))
    whole = TEXT.fullmatch(text)
    if whole is not None:
        said = whole[1].strip()
        if parse_number(said) is None:
            return Answer(said, frozenset(), False, True)
        text = said
    text = inside(_LABEL.sub("", text, count=1))
    text = text if named else inside(_NAME.sub("", text))
    units: set[str] = set()
    text, linked = _LINKS.subn(", ", _without_text(_DEGREE.sub("", text), units))
    text = _without_signs(_without_bare(text, units), units)
    return Answer(inside(_without_stop(text)), frozenset(units), linked > 0, False)


def _without_stop(text: str) -> str:
    return text if text.endswith("..") else text.removesuffix(".").rstrip()


def _without_text(text: str, units: set[str]) -> str:
    """`text` without units in \\text{} behind values, whose names go to `units`, and without empty text."""
    parts, at = [], 0
    for found in TEXT.finditer(text):
        before, said = text[at : found.start()], found[1].replace("~", " ").strip()
        end = _END.match(text, found.end())
        value = re.sub(r"(?:\\[,;: ]|\s|~)+$", "", before)
        behind = _VALUE.search(value) and not _TEXT_LAST.search(value)
        said = re.sub(r"(?<=[a-zA-Z])(?:\^\{?[23]\}?|[23])$", "", said)
        if end and behind and (not said or _is_unit(said)):
            parts.append(before)
            units |= _names(said)
            at = end.end()
    return "".join(parts) + text[at:]


def _without_bare(text: str, units: set[str]) -> str:
    """`text` without words behind its last number: an abbreviation, or words of three letters, apart from the number.

    Fewer letters are variables: 5c is no 5.
    """
    found = _BARE.search(text)
    if found is None:
        return text
    words = found["words"].strip().rstrip(".").split()
    known = _SHORT.fullmatch(words[0]) or (words[0].rstrip("s") in _SAME and len(words[0]) > 2)
    apart = bool(found["space"].strip("\\!")) and len(words[0]) > 2
    if not (known or apart) or not _is_unit(found["words"]):
        return text
    units |= _names(found["words"])
    return text[: found.start()]


def _without_signs(text: str, units: set[str]) -> str:
    """`text` without a percent sign at its end and a currency sign in front of its number."""
    text = inside(text)
    bare = re.sub(r"(?<=[0-9}\])])\s*\\?%$", "", text)
    number = re.sub(r"^([-+]?)(?:\\?\$|[€£¥₹])\s*(?=[-+]?(?:[0-9.]|\\[dt]?frac))", r"\1", bare)
    units |= {sign for sign, is_there in (("%", bare != text), ("$", number != bare and "$" in bare[:4])) if is_there}
    return number


def _is_unit(text: str) -> bool:
    return is_unit(text) and len(text.split()) <= MAX_WORDS


def _names(text: str) -> set[str]:
    words = [word.replace(".", "").casefold() for word in text.split()]
    return {_SAME[name] for word in words[:2] if (name := word if word in _SAME else word.removesuffix("s")) in _SAME}
