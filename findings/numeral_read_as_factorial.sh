#!/usr/bin/env bash
# math-verify 0.9.0 with latex2sympy2_extended 1.11.0: a numeral in round brackets with its base below in braces,
# (101)_{2}, is parsed as a falling factorial, 101!/99! = 10100. Without the braces, (101)_2, it stays text.
# Guessed before: 5 for both, as bases are what such answers are about, or text for both.
# So what: a grader calls the right answer wrong, and two ways to write it unequal. Needs Python 3.10 or later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet math-verify==0.9.0 latex2sympy2_extended==1.11.0 sympy==1.14.0 antlr4-python3-runtime==4.9.3
"$folder/env/bin/python" - <<'END'
from math_verify import parse, verify

braced, bare, value = (parse(f"\\boxed{{{text}}}") for text in ("(101)_{2}", "(101)_2", "5"))
print("(101)_{2}:", braced, " (101)_2:", bare)
assert braced[0].doit() == 10100, braced
assert bare == ["(101)_2"], bare
assert not verify(value, braced) and not verify(value, bare) and not verify(bare, braced)
END
