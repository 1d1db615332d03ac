#!/usr/bin/env bash
# ml_dtypes 0.6.0: -8 in int4 negated is 8, which int4 does not have: it prints, compares and converts as 8, and is
# equal neither to 8 cast to int4 nor to -8. A sum wraps round. Guessed before: -8, as NumPy's int8 has -128.
# So what: abs() of int4 codes gives codes that no table of sixteen holds. Needs Python 3.11 or later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet ml_dtypes==0.6.0 numpy==2.4.6
"$folder/env/bin/python" - <<'END'
import ml_dtypes
import numpy as np

code = np.array([-8], ml_dtypes.int4)
print("-(-8):", -code, " abs:", abs(code), " 7+7:", np.array([7], code.dtype) + np.array([7], code.dtype))
assert (-code).astype(np.int8)[0] == 8 == abs(code).astype(np.int8)[0]
assert not (-code == code)[0] and not (-code == np.array([8]).astype(code.dtype))[0]
assert (np.array([7], code.dtype) + np.array([7], code.dtype)).astype(np.int8)[0] == -2
assert -np.array([-128], np.int8)[0] == -128
END
