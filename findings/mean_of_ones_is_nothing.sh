#!/usr/bin/env bash
# ml_dtypes 0.6.0 in NumPy 2.4.6: of twenty ones in float4_e2m1fn the sum is 4, the dot product 6, the product with a
# matrix of ones 20, and the mean 0. NumPy's own float16 adds in a wider type. Guessed before: 6, 6, 6 and 0.25, as all
# saturate alike, or the right numbers, as for float16.
# So what: statistics of packed weights need dtype=np.float32, which gives 20 and 1. Needs Python 3.11 or later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet ml_dtypes==0.6.0 numpy==2.4.6
"$folder/env/bin/python" - <<'END'
import ml_dtypes
import numpy as np

ones = np.ones(20, ml_dtypes.float4_e2m1fn)
found = [float(x) for x in (ones.sum(), ones.dot(ones), (np.ones((1, 20), ones.dtype) @ ones)[0], ones.mean())]
print("sum, dot, matrix, mean:", found, " in float32:", ones.sum(dtype=np.float32), ones.mean(dtype=np.float32))
assert found == [4, 6, 20, 0], found
assert ones.sum(dtype=np.float32) == 20 and ones.mean(dtype=np.float32) == 1
assert np.ones(5000, np.float16).mean() == 1
END
