"""The worker process of task/grader/latex.py: reads and writes one JSON object a line.

Input: gold, limit_s, and either answer (the answer alone) or text (math-verify looks for the answer in it, with its
default settings). Output: equal, and canonical, the answer as SymPy writes it.

An answer alone is read strictly, by math-verify with some of its parts replaced: all of the answer has to be LaTeX;
numbers side by side are no sum, except a whole number and a proper fraction; and numbers are equal if they are exactly,
or nearly if a decimal is among them, in relation to their size.

The script imports nothing from this project, so it starts as fast as math-verify. The kernel ends it: with a CPU timer,
which also stops a single long instruction, or when it exceeds its memory.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

MAX_CANONICAL = 200  # characters of a canonical form
NO_ALARM = 0  # disables math-verify's own time limit; the kernel's timer replaces it
DIGITS = 50  # to which two exact numbers are worked out
EXACT, NEAR = 1e-40, 1.000001e-6  # relative differences of equal numbers, without and with a decimal among them
_NUMBER = re.compile(r"[0-9]*\.?[0-9]+")


def main() -> None:
    gib = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (gib << 30, gib << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    logging.disable(logging.CRITICAL)
    replies, sys.stdout = sys.stdout, sys.stderr  # keeps what packages print out of the replies
    compare("\\frac{1}{2}", "0.5", whole=False)  # warm up outside the time limit
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["limit_s"])  # its signal ends the process
        answer = request.get("answer")
        reply = compare(request["gold"], request["text"] if answer is None else answer, whole=answer is None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), file=replies, flush=True)


def compare(gold: str, answer: str, whole: bool) -> dict[str, Any]:
    """Whether `answer` equals `gold`, and how SymPy writes it. If `whole`, it is a text that contains the answer."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    try:
        if whole:
            targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
            golds = parse(f"\\boxed{{{gold}}}", extraction_config=targets, parsing_timeout=NO_ALARM)
            expressions = parse(answer, parsing_timeout=NO_ALARM)
            equal = verify(golds, expressions, timeout_seconds=NO_ALARM)
        else:
            with strict():
                expressions = parse_answer(answer)
                equal = holds(expressions) and verify(parse_answer(gold), expressions, timeout_seconds=NO_ALARM)
        canonical = str(expressions[0])[:MAX_CANONICAL] if expressions else answer
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, MemoryError, RecursionError):
        return {"equal": False, "canonical": answer}  # raised by SymPy for text that only looks like mathematics
    return {"equal": equal, "canonical": canonical}


@lru_cache(maxsize=1024)
def parse_answer(text: str) -> list[Any]:
    from latex2sympy2_extended.math_normalization import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    rules = NormalizationConfig(units=False, malformed_operators=True, nits=True)  # units.py has taken units off
    targets = [LatexExtractionConfig(False, boxed_match_priority=0, normalization_config=rules)]
    return parse(f"\\boxed{{{text}}}", extraction_config=targets, parsing_timeout=NO_ALARM)


@contextmanager
def strict() -> Iterator[None]:
    """Inside, math-verify reads products and compares numbers as the functions below do."""
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
    from math_verify import grader

    reader: Any = _Latex2Sympy
    lenient = reader.convert_postfix_list, grader.sympy_numeric_eq

    def numeric_eq(left: Any, right: Any, *options: int) -> bool:
        found = equal_numbers(left, right)
        return lenient[1](left, right, *options) if found is None else found

    reader.convert_postfix_list, grader.sympy_numeric_eq = product, numeric_eq
    try:
        yield
    finally:
        reader.convert_postfix_list, grader.sympy_numeric_eq = lenient


def product(self: Any, factors: list[Any], first: int = 0) -> Any:
    """What stands side by side, from the factor `first` on. Raises ValueError for numbers that do, and for what is no
    factor. A whole number before a proper fraction is a mixed number."""
    import sympy

    left = self.convert_postfix(factors[first])
    if first == len(factors) - 1:
        return left
    if isinstance(left, list) and len(left) == 1:  # of a derivative
        return sympy.Derivative(self.convert_postfix_list(factors, first + 1), left[0])
    if not isinstance(left, sympy.Expr | sympy.MatrixBase):
        raise ValueError("only numbers and expressions are multiplied")
    texts = [re.sub(r"[{}\\]", "", factor.getText()) for factor in factors[first : first + 2]]
    if _NUMBER.fullmatch(texts[0]) and _NUMBER.match(texts[1]):
        raise ValueError("numbers side by side")
    right = self.convert_postfix_list(factors, first + 1)
    if getattr(left, "is_Matrix", False) or getattr(right, "is_Matrix", False):
        return self.mat_mul_flat(left, right)
    if texts[0].isdigit() and re.match("[dtc]?frac", texts[1]) and getattr(right, "is_Rational", False):
        if not 0 < right < 1:
            raise ValueError("no proper fraction in a mixed number")
        return left + right
    return self.mul_flat(left, right)


def equal_numbers(left: Any, right: Any) -> bool | None:
    """Whether two numbers are equal, or two expressions term by term; None if one is neither, or a percentage."""
    import sympy

    both = (left, right)
    if not all(isinstance(one, sympy.Expr) and not isinstance(one, sympy.MatrixExpr) for one in both):
        return None
    if not all(one.is_number for one in both):
        return None if any(one.has(sympy.Float) for one in both) else bool(sympy.expand((left - right).doit()) == 0)
    if any(one.has(sympy.UnevaluatedExpr) for one in both):
        return None
    left, right = left.doit(), right.doit()
    if not (left.is_finite and right.is_finite) or (left.is_Rational and right.is_Rational):
        return bool(left == right)
    limit = NEAR if left.has(sympy.Float) or right.has(sympy.Float) else EXACT
    values = [sympy.N(one, DIGITS) for one in (left, right)]
    return bool(abs(values[0] - values[1]) <= limit * max(map(abs, values)))


def holds(expressions: list[Any]) -> bool:
    """Whether all equations between numbers in an answer are true; the value of `17 = 18` is not its last side."""
    import sympy

    parts = [one for whole in expressions if isinstance(whole, sympy.Basic) for one in sympy.preorder_traversal(whole)]
    sides = [one.args for one in parts if isinstance(one, sympy.Eq)]
    return all(equal_numbers(*both) is not False for both in sides if all(side.is_number for side in both))


if __name__ == "__main__":
    main()
