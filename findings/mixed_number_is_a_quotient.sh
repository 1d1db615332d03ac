#!/usr/bin/env bash
# math-verify 0.9.0 with latex2sympy2_extended 1.11.0: the mixed number 3 1/2 is parsed as (3 + 1) / 2 = 2, and 1 1/2
# as 1. 3\frac{1}{2} is 7/2. Guessed before: 7/2, or 31/2, or text.
# So what: whoever writes fractions in a line is graded for another number. Needs Python 3.11 or later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet math-verify==0.9.0 latex2sympy2_extended==1.11.0 sympy==1.14.0 antlr4-python3-runtime==4.9.3
"$folder/env/bin/python" - <<'END'
from math_verify import parse, verify

plain, set_, two, one = (parse(f"\\boxed{{{text}}}") for text in ("3 1/2", r"3\frac{1}{2}", "2", "1"))
print("3 1/2:", plain, r" 3\frac{1}{2}:", set_)
assert verify(two, plain) and not verify(set_, plain)
assert verify(one, parse(r"\boxed{1 1/2}"))
END
