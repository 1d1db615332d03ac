"""Characters and layout of an answer, as the LaTeX commands that math-verify knows: π is \\pi, √3 is \\sqrt{3}.

What math-verify does not know it leaves out or takes for a name, and either makes an answer right or wrong by how it is
written. Left out: digits of other scripts, which no answer may have (latex.py), and dashes other than a minus.
"""

from __future__ import annotations

import re
import unicodedata

_LETTERS = {
    **dict.fromkeys("\u00a0\u2002\u2003\u2009\u200a\u202f\u205f\t\n", " "),
    **dict.fromkeys("\u2212\ufe63", "-"),
    **dict.fromkeys("\u2044\u2215", "/"),
    **dict.fromkeys("°º˚", "^{\\circ}"),
    **dict.fromkeys("·⋅∙", "\\cdot "),
    **{"×": "\\times ", "÷": "\\div ", "±": "\\pm ", "∓": "\\mp ", "π": "\\pi ", "∞": "\\infty "},
    **{"≤": "\\le ", "⩽": "\\le ", "≥": "\\ge ", "⩾": "\\ge ", "≠": "\\ne ", "∈": "\\in ", "∪": "\\cup "},
    **{"∩": "\\cap ", "∅": "\\emptyset ", "ℝ": "\\mathbb{R}", "⟨": "\\langle ", "⟩": "\\rangle "},
    **{"′": "'", "″": "''", "\u200b": ""},
}
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_TABLE = str.maketrans(_LETTERS)
_STYLE = r"\\(?:displaystyle|textstyle|boldsymbol|bm|underline|mathbf|mathit|mathsf|mathtt|(?:text)?color\s*\{[a-z]+\})"
_NO_VARIABLE = r"\{[~ ]*(?:\([A-Z]\)|[a-zA-Z]+[^{}a-zA-Z]*[a-zA-Z])"  # two letters, or a choice
_DEGREE = r"\^\s*(?:\{\s*(?:\\circ|o)\s*\}|\\circ(?![a-zA-Z])|\\text\{o\}|o(?![a-zA-Z]))|\\(?:text)?degree\b"
_PATTERNS = (
    (re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+"), lambda found: f"^{{{found[0].translate(_RAISED)}}}"),
    (re.compile("[₀-₉]+"), lambda found: f"_{{{found[0].translate(_LOWERED)}}}"),
    (re.compile("[¼-¾⅐-⅞]"), lambda found: _fraction(found[0])),
    (re.compile(r"(?:√|\\?sqrt)\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?:√|(?<![\\a-zA-Z])sqrt)\s*([0-9]+(?:\.[0-9]+)?|[a-zA-Z]|\\[a-zA-Z]+)"), r"\\sqrt{\1}"),
    (re.compile(r"√\s*(?=\{)"), r"\\sqrt"),
    (re.compile(r"(?<![\\a-zA-Z])(sqrt|pi|sin|cos|tan|cot|sec|csc|log|ln)(?![a-zA-Z])"), r"\\\1"),
    (re.compile(r"<=|>=|!=|\*\*"), lambda found: {"<=": "\\le ", ">=": "\\ge ", "!=": "\\ne ", "**": "^"}[found[0]]),
    (re.compile(_STYLE + r"(?![a-zA-Z])\s*"), ""),
    (re.compile(r"\\(?:text(?:rm|bf|it|sf|tt|normal)|[mh]box)(?![a-zA-Z])\s*"), r"\\text"),
    (re.compile(rf"\\mathrm\s*(?={_NO_VARIABLE})"), r"\\text"),
    (re.compile(rf"(?<=[0-9}}])\s*(?:{_DEGREE})"), r"^{\\circ}"),
    (re.compile(r"_\{\s*\\text\{\s*([0-9]+)\s*\}\s*\}"), r"_{\1}"),
    (re.compile(r"\(([0-9]+)\)(?=_\{?[0-9])"), r"\1"),  # math-verify reads (25)_8 as a number of permutations
    (re.compile(r",\\!\s*"), ","),
    (re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar)\s*\{([0-9]+)\}"), lambda found: _repeating(*found.groups())),
    (re.compile(r"^([-+]?[0-9]+)\s+([0-9]+)/([0-9]+)$"), r"\1\\frac{\2}{\3}"),
)
_AROUND = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("\\boxed{", "}"), ("{", "}"))


def in_latex(text: str) -> str:
    """`text` with commands for characters, one command for text, and without what surrounds it or changes its look."""
    text = text.strip().translate(_TABLE)
    for pattern, command in _PATTERNS:
        text = pattern.sub(command, text)
    return inside(text)


def inside(text: str) -> str:
    """`text` without dollar signs, boxes and braces around the whole of it, and spaces at its ends."""
    while True:
        text = re.sub(r"^(?:\\[,;:!]|\s)+|(?:\\[,;:! ]|\s|~)+\\?$|(?<=[^\\])\\$", "", text)
        for start, end in _AROUND:
            if text.startswith(start) and text.endswith(end) and len(text) >= len(start + end):
                middle = text[len(start) : len(text) - len(end)]
                if not re.search(r"(?<!\\)\$", middle) and is_balanced(middle):
                    text = middle
                    break
        else:
            return text


def is_balanced(text: str) -> bool:
    """Whether braces match. If not, an answer could close the box it is put in and open another."""
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", text):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def words_of(text: str) -> str:
    """The words of `text` in lower case, a space apart."""
    return " ".join(re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).casefold()))


def _repeating(whole: str, fixed: str, period: str) -> str:
    """A decimal without end as a fraction: 0.8\\overline{3} is (83 - 8) / 90."""
    top = int(whole + fixed + period) - int(whole + fixed or "0")
    return f"\\frac{{{top}}}{{{'9' * len(period) + '0' * len(fixed)}}}"


def _fraction(letter: str) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", letter).partition("\u2044")
    return f"\\frac{{{top}}}{{{bottom}}}"
