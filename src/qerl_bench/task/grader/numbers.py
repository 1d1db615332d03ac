"""The number that a text states, read strictly and exactly: `task.equality=numeric`.

A lenient reader turns into reward that the policy did not earn (comparing first characters makes 15 a match for 18),
a literal one withholds reward that it did ("$18", "18.0" and "1,000" are right answers too). So the number is read as
an exact fraction, and whatever is ambiguous is wrong. Left out on purpose: LaTeX beyond the few ways to set a single
number, expressions, mixed numbers ("1 1/2"), words before the number, and spelled-out numbers. Nothing here raises on
any text, and the work is linear in its length.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_LENGTH = 200  # characters; a longer text is no number (and Python refuses integers of thousands of digits)
MAX_EXPONENT = 100  # of ten, either way; beyond it "1e1000000000" would take gigabytes to write out

# How LaTeX sets one number: 1{,}000 and 1,\!000, \frac{1}{2} (behind no digit), 18\text{ cm}, 18\,cm, $18$.
_LATEX = (
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"(?<![0-9.,])\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}"), r"\1/\2"),
    (re.compile(r"\\(?:text|textbf|mathrm)\{([^{}\\]*)\}"), r"\1"),
    (re.compile(r"\\[,; ]|~"), " "),
    (re.compile(r"^\$([^$]*)\$$"), r"\1"),
)

# ASCII digits only. In "0,123" the comma must be a decimal one, so a leading zero takes no thousands separator.
_INTEGER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)"
_SIGN = re.compile(r"(?P<before>[+-]?)(?:(?:\\?\$|[€£¥₹])\s*)?(?P<after>[+-]?)")
_RATIO = re.compile(rf"(?P<top>{_INTEGER})\s*/\s*(?P<bottom>[0-9]+)")
_DECIMAL = re.compile(rf"(?P<mantissa>{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE](?P<exponent>[+-]?[0-9]+))?")

# One word of the text after a number: "%", "°C", "/hr", "€", "km/h", "sq.", "children's".
_LETTERS = r"[^\W\d_]+"
_UNIT = re.compile(rf"(?:\\?[%$]|[°/€£¥₹])?{_LETTERS}(?:[-/.'\u2019]{_LETTERS})*[.'\u2019]?|\\?[%$]|[°€£¥₹]")
# Words that make it a different number ("5 million", "3 and a half", "18 or twenty", "$5M"). Quarters may be coins.
_NUMBER_WORD = re.compile(
    r"(?i:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fifteen|eighteen|"
    r"(?:four|six|seven|nine)teen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|"
    r"(?:hundred|thousand|million|billion|trillion|dozen|k|mn|bn)s?|"
    r"half|halves|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s?|"
    r"plus|minus|squared|cubed)|M|B"
)


def parse_number(text: str) -> Fraction | None:
    """The one number that `text` states, exactly, or None if it states none, several, or an ambiguous one.

    Read: an optional sign (+, -, U+2212), an optional currency sign ($ € £ ¥ ₹, before or after the sign), then an
    integer, a decimal or a ratio of integers, thousands separators in well-formed groups of three, an exponent of ten
    up to MAX_EXPONENT; then units in words, a percent, degree or currency sign, a final full stop. A percent sign is a
    unit: "18%" is 18. The same set in LaTeX: \\frac{1}{2}, 1{,}000, 18\\text{ cm}, $18$.

    Refused: any further digit ("18-20", "10:30", "18 m2", "1,00"), any numeric character that is not an ASCII digit
    ("½", "18 m²", other scripts' digits), words that change the value ("5 million", "18k", "3 and a half"), words
    before the number, a sign apart from its number ("- 3", which may be a list item), operators, a zero denominator.
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
    if number is None or not _is_unit(text[number.end() :]):
        return None
    value = _value(number.groupdict())
    if value is None:
        return None
    return -value if "-" in (sign["before"], sign["after"]) else value


def _is_unit(tail: str) -> bool:
    """Whether the text after a number leaves it as it is: nothing, or units in words that hold no number themselves."""
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
