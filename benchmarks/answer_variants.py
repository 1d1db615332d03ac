"""Ways to write a reference answer, right and wrong, made by machine: (kind, text, whether it is right).

Only what is right or wrong for certain: a wrong text names another value, denies or hedges the right one, or changes
it; a right one changes nothing but how it is written. Numbers are worked out as exact fractions, independently of the
graders that are compared (benchmarks/graders.py, tests/reports/test_written_answers.py).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction

Variant = tuple[str, str, bool]
# Templates in which <g> is the answer and <h> another one, with the kind that they are of.
LAYOUT = (" <g> ", "<g>.", "$<g>$", r"\displaystyle <g>", "{<g>}", r"\(<g>\)", r"\,<g>")
HEDGES = {
    "or": (r"<g>\text{ or }<h>", "<g> or <h>", r"<h>\text{ or }<g>", r"<g>\mbox{ or }<h>"),
    "or in words": (r"<g>\text{ or <h>}", r"<g>\text{ (or <h>)}", r"<g>\textbf{ or <h>}"),
    "list": ("<g>, <h>", "<g>; <h>", r"<g>\text{, <h>}", r"<g>\text{ and }<h>"),
    "denied": (r"<g>\text{ not <h>}", r"\text{not }<g>", r"<g>\text{ is wrong}", r"\neq <g>", r"\cancel{<g>}"),
    "denied, too": (r"<g>\text{ is incorrect}", r"<g>\text{ is not right}"),
    "revised": (r"<g>\text{, no wait }<h>", r"<g>\text{ no, it is <h>}", r"<g> \to <h>"),
    "open": (r"<g>\text{ or more}", r"<g>\text{ at most}", r"<g>\text{ or so}", r"\approx <g>", r"<g>\ldots"),
    "open, too": (r"\text{at least }<g>", r"<g>\text{ approximately}", r"<g>\text{ or less}", r"\text{about }<g>"),
    "doubted": (r"<g>\text{ perhaps}", r"<g>\text{ maybe}", r"<g>\text{ (?)}"),
    "hidden": (r"\phantom{<g>}", r"<h>\phantom{<g>}", "", r"\text{}", r"<g>\text{ }<h>"),
    "another": ("<h>",),
}
UNITS = (r"<g>\text{ cm}", r"<g>\text{ apples}", r"<g>\,\mathrm{cm}", r"<g>\text{ miles per hour}", r"<g>\text{ cm}^2")
SIGNS = (r"<g>\mbox{ inches}^3", r"\$<g>", r"<g>\%", "<g>°", r"<g>^{\circ}")
WHOLE_UNITS = ("<g> apples", r"<g>\text{ m/s}", "<g> cm", r"\text{<g> cm}")
WHOLE = ("<g>.0", "<g>.00", "<g>e0", r"<g> \cdot 1", "(<g>)", "<g>.00E0", r"\mathbf{<g>}", r"\text{<g>}")
NOT_WHOLE = ("<g>1", "1<g>", "<g>.5", "<g>.0001", "(<g>)^2+(<g>)+1")  # of a number that may be 0
NOT_NUMBER = ("<g>0", "<g>k", "<g>x", r"<g>\text{}1", "<g>$1", '<g>"1', r"<g>^{\circ}1", "<g>t", "<g> c")  # of no 0
WORDS = ("<g>", r"\text{ <g> }", r"\textbf{<g>}", r"\mathrm{<g>}", "<g>.", r"\text{<g>.}", r"\textit{<g>}")
NOT_WORDS = (
    r"\text{<g> or not}",
    r"\text{not <g>}",
    r"\text{<g>ish}",
    r"\text{un<g>}",
    "not <g>",
    "<g> or not",
    "<g>5",
)
SAME = ("(<g>)", r"1 \cdot (<g>)", "<g> + 0", r"\frac{2(<g>)}{2}", "0+<g>")
CHANGED = ("-(<g>)", "(<g>)+1", "10(<g>)", "(<g>)^3", "(<g>)x", r"\frac{1}{<g>}")
CHARACTERS = (
    *(("\\pi", "π"), ("\\infty", "∞"), ("\\cup", "∪"), ("\\pm", "±"), ("^\\circ", "°"), ("\\in", "∈"), ("-", "\u2212")),
    *((r"\sqrt{13}", "√13"), (r"\sqrt{5}", "√5"), (r"\sqrt{2}", "√2"), (r"\sqrt{3}", "√3"), ("x^2", "x²"), ("^5", "⁵")),
    *((r"\frac{1}{2}", "½"), (r"\frac{1}{4}", "¼"), (r"\frac{1}{3}", "⅓"), (r"\cdot", "·"), ("_8", "₈"), ("_5", "₅")),
)
RESPELLED = ((r"\\left|\\right", ""), (r"\\frac", r"\\dfrac"), (r"\\frac", r"\\tfrac"), (", ", ","), (",", ", "))


def variants(gold: str, other: str, count: int = 20) -> list[Variant]:
    """Up to `count` right and `count` wrong ways to write `gold`, the same ones every time; the first is `gold` itself.

    `other` is an answer with another value (other_of).
    """
    found = dict.fromkeys((("itself", gold, True), *_any(gold, other), *_special(gold)))
    right, wrong = ([one for one in found if one[2] is wanted] for wanted in (True, False))
    draw = random.Random(gold)
    return [right[0], *_some(right[1:], count - 1, draw), *_some(wrong, count, draw)]


def other_of(golds: list[str], index: int) -> str:
    """The next of `golds` that is neither equal to the one at `index` nor a part of it, nor it of that."""
    gold = _core(golds[index])
    for other in golds[index + 1 :] + golds[:index]:
        bare = _core(other)
        shared = {gold, *gold.split(",")} & {bare, *bare.split(",")}
        if not shared and (value_of(gold) is None or value_of(gold) != value_of(bare)):
            return other
    raise ValueError(f"no other answer than {golds[index]}")


def value_of(gold: str) -> Fraction | None:
    """The number that a reference states: an integer, a decimal or a fraction, without units."""
    text = re.sub(r"^\\\$|,\\! ?|\^\\circ$|\\%$|(?<=\d),(?=\d{3})|\s*\\(?:text|mbox)\{ [a-z]+\}(\^2)?$", "", gold)
    text = re.sub(r"^(-?)\\[dt]?frac *\{?(\d+?)\}? *\{?(\d+)\}?$", r"\1\2/\3", text)
    return Fraction(text) if re.fullmatch(r"-?(?:\d+(?:\.\d*)?|\.\d+|\d+/\d+)", text) else None


def _some(pool: list[Variant], count: int, draw: random.Random) -> list[Variant]:
    return draw.sample(pool, min(count, len(pool)))


def _filled(kind: str, templates: Iterable[str], right: bool, gold: str, other: str = "") -> Iterator[Variant]:
    for template in templates:
        yield kind, template.replace("<g>", gold).replace("<h>", other), right


def _core(gold: str) -> str:
    return re.sub(r"^[a-z] ?= ?|\s|\\left|\\right|\\[{}]|[()\[\]]", "", gold)


def _any(gold: str, other: str) -> Iterator[Variant]:
    in_words = gold.startswith("\\text")
    has_name = re.search(r"[=<>_]|\\in", gold) is not None
    is_bare_list = "," in gold and value_of(gold) is None and gold[0] not in "([\\"
    yield from _filled("layout", LAYOUT, True, gold)
    if not in_words:
        yield from _filled("colour", (r"\color{red}{<g>}", r"\boldsymbol{<g>}"), True, gold)
    if not (in_words or has_name or is_bare_list):
        yield from _filled("named", ("A = <g>", r"\text{Answer} = <g>"), True, gold)
    for kind, templates in HEDGES.items():
        unsure = in_words or other.startswith("\\text")  # words behind a value without a link may be its unit
        sure = [one for one in templates if not (unsure and kind in ("list", "or") and "text" not in one)]
        yield from _filled(kind.removesuffix(", too"), sure, False, gold, other)
    for command, letter in CHARACTERS:
        text = re.sub(re.escape(command) + r"(?![a-zA-Z]) ?", letter, gold)
        if text != gold and not (in_words and command == "-"):
            yield "characters", text, True
    for old, new in RESPELLED:
        if re.search(old, gold) and value_of(gold) is None:
            yield "layout", re.sub(old, new, gold), True


def _special(gold: str) -> Iterator[Variant]:
    value = value_of(gold)
    if value is not None:
        yield from _number(gold, value)
    elif gold.startswith("\\text"):
        yield from _words(re.sub(r"\\text\{|\}", "", gold).strip("()"), gold)
    elif re.fullmatch(r"[0-9]+_\{?[0-9]\}?", gold):
        digits, base = re.findall("[0-9]+", gold)
        same = (f"<g>_{{{base}}}", f"(<g>)_{{{base}}}", f"<g>_{{\\text{{{base}}}}}")
        yield from _filled("base", same, True, digits)
        yield from _filled("base", (f"<g>_{int(base) + 1}", f"<g>1_{base}"), False, digits)
    elif "\\cup" in gold or " \\in " in gold:
        yield from _intervals(gold)
    elif "," in gold and re.match(r"\\left[(\[]|\\\{|[(\[]", gold):
        yield from _bracketed(gold)
    elif "," in gold:
        yield from _list([part.strip() for part in gold.split(",")])
    elif not re.search(r"[=<>]|matrix|pm", gold):
        yield from _filled("another", CHANGED, False, gold)
        yield from _filled("worked out", SAME, True, gold)
    if re.fullmatch(r"[0-9]+ ?\\pm.*", gold):
        both = [gold.replace("\\pm", sign) for sign in "+-"]
        yield from (("signs", ", ".join(both), True), ("signs", ", ".join(both[::-1]), True), ("signs", both[0], False))
    if gold.startswith("\\begin{pmatrix}"):
        yield "matrix", gold.replace("pmatrix", "bmatrix"), True
        yield from (("matrix", gold.replace("{pmatrix} ", "{pmatrix} -1"), False), ("matrix", gold[:-13], False))


def _number(gold: str, value: Fraction) -> Iterator[Variant]:
    n, d = value.numerator, value.denominator
    sign, a = ("-", -n) if n < 0 else ("", n)
    plain = f"{n}" if d == 1 else f"{sign}\\frac{{{a}}}{{{d}}}"
    if re.fullmatch(r"-?[0-9.]+|-?\\[dt]?frac[^a-z]*[0-9}]", gold):
        yield from _filled("unit", UNITS + SIGNS + (WHOLE_UNITS if d == 1 else ()), True, plain)
    for k in (1, 2, 7):
        yield from (
            ("fraction", f"{sign}{a * k}/{d * k}", True),
            ("fraction", f"{sign}\\frac{{{a * k}}}{{{d * k}}}", True),
        )
    yield from (("fraction", f"{sign}\\{kind}frac{{{a}}}{{{d}}}", True) for kind in "dtc")
    sums = (f"{3 * n} \\div {3 * d}", f"\\frac{{{n - d}}}{{{d}}} + 1", f"2 \\cdot \\frac{{{n}}}{{{2 * d}}}")
    yield from _filled("worked out", sums, True, plain)
    others = (f"{n + d}/{d}", r"<g>\text{ hours }30\text{ minutes}", "|<g>|+1")
    yield from _filled("another", others, False, plain)
    if n:
        yield "another", f"-{gold}" if n > 0 else gold.removeprefix("-"), False
        yield from _filled("another", (r"\pm <g>", r"<g>\text{ million}"), False, plain)
        yield from _filled("glued", NOT_NUMBER if d == 1 else NOT_NUMBER[-1:], False, plain)
    yield from _whole(n) if d == 1 else _fraction(sign, a, d)


def _whole(n: int) -> Iterator[Variant]:
    yield from _filled("number", (*WHOLE, f"{n / 10:.1f}e1", f"{n / 10:.1f} \\times 10^1"), True, str(n))
    for mark in (",", "{,}", "\\,", ",\\!", " ", "\u202f") if abs(n) >= 1000 else ():
        yield "thousands", f"{n:,}".replace(",", mark), True
    yield from _filled("another", NOT_WHOLE, False, str(n))
    yield from _filled("steps", (f"{n - 1} = <g>", f"<g> = {n + 1}", f"x = <g> = {n + 2}"), False, str(n))


def _fraction(sign: str, a: int, d: int) -> Iterator[Variant]:
    exact = (Fraction(a, d) * 10**12).denominator == 1
    shown = [f"{a / d:.12f}".rstrip("0")] if exact else [f"{a / d:.8g}", f"{a / d:.10g}"]
    yield from (("decimal", sign + text, True) for text in (*shown, *(one.removeprefix("0") for one in shown)))
    yield from (("decimal", f"{sign}{a / d:.{k}f}", False) for k in (() if exact else (2, 3)))
    yield from (("another", f"{sign}{text}", False) for text in (f"\\frac{{{a}}}{{{d + 1}}}", f"{d}/{a}", f"{a}, {d}"))
    if a > d:
        yield "mixed", f"{sign}{a // d}\\frac{{{a % d}}}{{{d}}}", True


def _words(bare: str, gold: str) -> Iterator[Variant]:
    yield from _filled("words", WORDS, True, gold.removeprefix("\\text{").removesuffix("}"))
    yield from _filled("words", (f"\\text{{{bare.upper()}}}", r"\text{<g>}", "<g>"), True, bare)
    yield from _filled("words", (*NOT_WORDS, bare[:-1], f"\\text{{{bare[::-1]}x}}", r"\text{none}"), False, bare)


def _intervals(gold: str) -> Iterator[Variant]:
    for old, new in (("(", "["), (")", "]"), ("[", "("), ("]", ")"), (",", ",1+")):
        if old in gold:
            yield "brackets", gold.replace(old, new), False
    if " \\in " in gold:
        yield "named", gold.partition(" \\in ")[2], True


def _list(parts: list[str]) -> Iterator[Variant]:
    links = (", ", r"\text{ and }", " and ", r"\text{ or }")
    yield from (("list", link.join(parts[::-1]), True) for link in links)
    yield "list", f"\\{{{', '.join(parts)}\\}}", True
    wrong = ("[<g>]", parts[0], "[<g>)", "(<g>, 0)", "<g>, 17", "<g>, x", "<g>+1", r"\{<g>+1\}", "(<g>+1)")
    yield from _filled("list", wrong, False, ", ".join(parts))


def _bracketed(gold: str) -> Iterator[Variant]:
    inner = re.sub(r"\\left|\\right|\\[{}]|[()\[\]]", "", gold).strip()
    parts = [part.strip() for part in inner.split(",")]
    first, last = re.sub(r"\\left|\\right", "", gold)[0], gold[-1]
    own = ("\\{", "\\}") if first == "\\" else (first, last)
    for left, right in (("(", ")"), ("[", "]"), ("(", "]"), ("[", ")"), ("\\{", "\\}")):
        yield "brackets", f"{left}{inner}{right}", (left, right) == own
    left, right = own
    yield "layout", f"\\left{left} {', '.join(parts)} \\right{right}", True
    yield "order", f"{left}{','.join(parts[::-1])}{right}", left == "\\{"
    changed = f"1+{inner}" if "infty" in parts[-1] else f"{inner}+1"
    for wrong in (changed, f"{inner}, 7", parts[0]):
        yield "brackets", f"{left}{wrong}{right}", False
