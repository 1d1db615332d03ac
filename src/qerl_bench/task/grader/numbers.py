"""Reads the number that a text states, strictly and exactly: `task.equality=numeric`.

A lenient reader gives rewards that the policy did not earn (comparing first characters makes 15 equal to 18); a literal
one withholds rewards that it did earn ("$18", "18.0" and "1,000" are right too). So a number is read as an exact
fraction, and ambiguous text is wrong. Left out: LaTeX other than common ways to write one number, expressions, mixed
numbers ("1 1/2"), words before the number, and spelled-out numbers. No text makes these functions raise, and they take
time linear in its length.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

MAX_LENGTH = 200  # characters; a longer text is not a number (and Python refuses integers of thousands of digits)
MAX_EXPONENT = 100  # of ten, positive or negative; "1e1000000000" would take gigabytes to write out

# One number in LaTeX: 1{,}000 and 1,\!000, \frac{1}{2} (not after a digit), 18\text{ cm}, 18\,cm, $18$.
_LATEX = (
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"(?<![0-9.,])\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}"), r"\1/\2"),
    (re.compile(r"\\(?:text|textbf|mathrm)\{([^{}\\]*)\}"), r" \1"),
    (re.compile(r"\\[,; ]|(?<=.)~"), " "),  # in front of a number a tilde says that it is about that
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)"), "°"),
    (re.compile(r"^\$([^$]*)\$$"), r"\1"),
)

# ASCII digits only. The comma in "0,123" can only be a decimal one, so a leading zero allows no separators.
_INTEGER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)"
_SIGN = re.compile(r"(?P<before>[+-]?)(?:(?:\\?\$|[€£¥₹])\s*)?(?P<after>[+-]?)")
_RATIO = re.compile(rf"(?P<top>{_INTEGER})\s*/\s*(?P<bottom>[0-9]+)")
_DECIMAL = re.compile(rf"(?P<mantissa>{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE](?P<exponent>[+-]?[0-9]+))?")

# One word of the text after a number: "%", "°C", "/hr", "€", "km/h", "sq.", "children's".
_LETTERS = r"[^\W\d_]+"
_UNIT = re.compile(rf"(?:\\?[%$]|[°/€£¥₹])?{_LETTERS}(?:[-/.'\u2019]{_LETTERS})*[.'\u2019]?|\\?[%$]|[°€£¥₹]")
# Words that change the number ("5 million", "3 and a half", "18 or twenty", "$5M"), leave it open ("18 or so", "18 at
# least", "18 perhaps") or deny it ("18 is wrong"). A quarter may be a coin.
_NUMBER_WORD = re.compile(
    r"(?i:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fifteen|eighteen|"
    r"(?:four|six|seven|nine)teen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|"
    r"(?:hundred|thousand|million|billion|trillion|dozen|k|mn|bn)s?|"
    r"half|halves|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s?|"
    r"plus|minus|squared|cubed|or|approx|approximate(?:ly)?|about|around|roughly|nearly|almost|circa|ish|"
    r"nor?|not|never|neither|either|cannot|wait|wrong|incorrect|invalid|impossible|unless|except|but|than|if|else|"
    r"least|most|may|maybe|might|could|should|perhaps|possibly|probably|likely|unlikely|presumably|apparently|"
    r"guess|unsure|uncertain|unknown|instead|rather|actually|otherwise|hmm|until|through|between|onwards?|upwards?)|M|B"
)


@lru_cache(2**14)  # the same answers are read for each point of a sweep
def parse_number(text: str) -> Fraction | None:
    """The exact number that `text` states, or None if it states none, several, or an ambiguous one.

    Accepted: an optional sign (+, -, U+2212), an optional currency sign ($ € £ ¥ ₹, before or after the sign), then an
    integer, a decimal or a ratio of integers, thousands separators in well-formed groups of three, an exponent of ten
    up to MAX_EXPONENT; then units in words, a percent, degree or currency sign, a final full stop. A percent sign is a
    unit: "18%" is 18. The same in LaTeX: \\frac{1}{2}, 1{,}000, 18\\text{ cm}, $18$.

    Rejected: any further digit ("18-20", "10:30", "18 m2", "1,00"), any numeric character that is not an ASCII digit
    ("½", "18 m²", other scripts' digits), words that change the value ("5 million", "18k", "3 and a half") or leave it
    open ("18 or so", "18 approx.", "~18"), words before the number, a space after the sign ("- 3" may be a list item),
    operators, a zero denominator.
    """
    text = text.replace("\u2212", "-").strip()
    if len(text) > MAX_LENGTH or any(letter.isnumeric() and not letter.isascii() for letter in text):
        return None
    for pattern, plain in _LATEX:
        text = pattern.sub(plain, text).strip()
    sign = _SIGN.match(text)
    assert sign is not None  # every part of the pattern is optional
    if sign["before"] and sign["after"]:
        return None
    number = _RATIO.match(text, sign.end()) or _DECIMAL.match(text, sign.end())
    if number is None or not is_unit(text[number.end() :]):
        return None
    value = _value(number.groupdict())
    if value is None:
        return None
    return -value if "-" in (sign["before"], sign["after"]) else value


def value_words(text: str) -> list[str]:
    """The words of `text`, in order, that change a number or leave it open; not "or", and none that may be products."""
    words = [word.casefold() for word in re.findall(_LETTERS, text)]
    return [word for word in words if len(word) > 2 and _NUMBER_WORD.fullmatch(word)]


def is_unit(tail: str) -> bool:
    """Whether the text after a number leaves its value unchanged: empty, or units whose words are not numbers."""
    words = tail.strip().removesuffix(".").split()
    return all(_UNIT.fullmatch(word) for word in words) and not any(
        _NUMBER_WORD.fullmatch(part) for part in re.findall(_LETTERS, tail)
    )


def _value(parts: dict[str, str | None]) -> Fraction | None:
    """The unsigned value of a match of _RATIO or _DECIMAL."""
    if (top := parts.get("top")) is not None:
        bottom = int(parts["bottom"] or 0)
        return Fraction(int(top.replace(",", "")), bottom) if bottom else None
    exponent = int(parts["exponent"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    return Fraction((parts["mantissa"] or "").replace(",", "")) * Fraction(10) ** exponent
