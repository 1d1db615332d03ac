#!/usr/bin/env bash
# ml_dtypes 0.6.0 in NumPy 2.4.6: with one NaN among them, values of BF16 and of the 8-bit floats stay unsorted: sort() gives
# 4, NaN, 1, 2 back as it is, and argsort() and partition() too. In E5M2 alone, unique() of 1, 2, 4, NaN is 1, counted four times.
# Guessed before: NaN goes last and the others are in order, as in NumPy's own float16 and float32.
# So what: ranks of scores and levels of a codebook are wrong, and nothing is said; cast to float32 first. Python 3.11 or later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet ml_dtypes==0.6.0 numpy==2.4.6
"$folder/env/bin/python" - <<'END'
import ml_dtypes
import numpy as np

nan = float("nan")
for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
    mixed = np.array([4, nan, 1, 2], getattr(ml_dtypes, name))
    ordered = np.array([1, 2, 4, nan], mixed.dtype)
    kept, counts = np.unique(ordered, return_counts=True)
    print(f"{name}: sort {np.sort(mixed)}, argsort {np.argsort(mixed)}, unique {kept} of counts {counts}")
    same = np.array([4, nan, 1, 2], np.float32)
    assert all(np.array_equal(f(mixed).astype(np.float32), same, equal_nan=True) for f in (np.sort, lambda x: np.partition(x, 1)))
    assert np.argsort(mixed).tolist() == [0, 1, 2, 3]
    assert counts.tolist() == ([4] if name == "float8_e5m2" else [1, 1, 1, 1])
for own in (np.float16, np.float32):
    mixed = np.array([4, nan, 1, 2], own)
    assert np.argsort(mixed).tolist() == [2, 3, 0, 1] and len(np.unique(mixed)) == 4
END
