#!/usr/bin/env bash
# math-verify 0.9.0 with latex2sympy2_extended 1.11.0: \boxed{5\%} and \boxed{5%} stay text, equal neither to 5 nor to 0.05 nor
# to 5%, and a number before them in the text is graded in their place. \boxed{\frac{5}{1}\%} is a percentage, equal to all
# three, and so is $5%$; $5\%$, as LaTeX needs it written, is the bare 5.
# Guessed before: each is a percentage, so equal to 0.05, and to 5 as a courtesy.
# So what: a model that writes the sign in the box gets no reward for a right number, and may get one for a number it only
# mentioned. Python 3.11 or later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet math-verify==0.9.0 latex2sympy2_extended==1.11.0 sympy==1.14.0 antlr4-python3-runtime==4.9.3
"$folder/env/bin/python" - <<'END'
from math_verify import parse, verify

golds = {text: parse(text) for text in (r"\boxed{5}", r"\boxed{0.05}", "5%", r"\boxed{40}")}


def equal(text: str) -> list[bool]:
    answer = parse(text)
    found = [verify(gold, answer) for gold in golds.values()]
    print(f"{text} is {answer[0]}, equal to", [gold for gold, same in zip(golds, found) if same])
    return found


assert equal(r"\boxed{5\%}") == equal(r"\boxed{5%}") == [False] * 4
assert equal(r"Of 40 dollars, the tax is \boxed{5\%}.") == [False, False, False, True]
assert equal(r"\boxed{\frac{5}{1}\%}") == equal("$5%$") == [True, True, True, False]
assert equal(r"$5\%$") == [True, False, True, False]
END
