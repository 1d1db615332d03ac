#!/usr/bin/env bash
# math-verify 0.9.0 with latex2sympy2_extended 1.11.0: 2^{10} \bmod 7, which is 2, is parsed as 7; with \mod it is
# Mod(2**10, 7). Guessed before: 2 for both, or text.
# So what: an answer in the usual binary form of LaTeX equals its divisor. Needs Python 3.11 or later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet math-verify==0.9.0 latex2sympy2_extended==1.11.0 sympy==1.14.0 antlr4-python3-runtime==4.9.3
"$folder/env/bin/python" - <<'END'
from math_verify import parse, verify

binary, other, two, seven = (parse(f"\\boxed{{{text}}}") for text in (r"2^{10} \bmod 7", r"2^{10} \mod 7", "2", "7"))
print(r"\bmod:", binary, r" \mod:", other)
assert verify(seven, binary) and not verify(two, binary)
assert str(other[0]) == "Mod(2**10, 7)", other
END
