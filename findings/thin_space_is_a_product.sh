#!/usr/bin/env bash
# math-verify 0.9.0 with latex2sympy2_extended 1.11.0: 7\,000, as LaTeX sets thousands, is parsed as 7 * 000 = 0.
# 7{,}000 is 7000. Guessed before: 7000 for both, or text for the first.
# So what: a grader calls the right answer wrong, and 0 equal to it. Needs Python 3.11 or later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet math-verify==0.9.0 latex2sympy2_extended==1.11.0 sympy==1.14.0 antlr4-python3-runtime==4.9.3
"$folder/env/bin/python" - <<'END'
from math_verify import parse, verify

spaced, comma, zero = (parse(f"\\boxed{{{text}}}") for text in (r"7\,000", "7{,}000", "0"))
print(r"7\,000:", spaced, " 7{,}000:", comma)
assert comma[0] == 7000 and spaced[0].doit() == 0, (comma, spaced)
assert verify(zero, spaced) and not verify(comma, spaced)
END
