#!/usr/bin/env bash
# ml_dtypes 0.6.0: NaN in float4_e2m1fn, float6_e2m3fn and float6_e3m2fn, which have no NaN, becomes -0, without a word;
# infinity becomes the largest value. Guessed before: the largest value for both, or an error.
# So what: a weight that training has broken is a healthy zero once packed: look for NaN before. Python 3.11 or later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet ml_dtypes==0.6.0 numpy==2.4.6
"$folder/env/bin/python" - <<'END'
import ml_dtypes
import numpy as np

for name, largest in (("float4_e2m1fn", 6), ("float6_e2m3fn", 7.5), ("float6_e3m2fn", 28)):
    found = np.array([np.nan, np.inf], np.float32).astype(getattr(ml_dtypes, name)).astype(np.float32)
    print(name, found)
    assert found[0] == 0 and np.signbit(found[0]) and found[1] == largest, found
END
