#!/usr/bin/env bash
# gguf 0.19.0 in NumPy 2.4.6: its MXFP4 rounds halves toward zero (3.5 to 3, 1.75 to 1.5, 0.25 to 0), where formats of
# four bits round to even (4, 2, 0), and a block with one NaN is read back as zeros. Guessed before: even, and NaN.
# So what: codes of halves, which values from BF16 often are, differ from those of other packers. Python 3.11 or later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet gguf==0.19.0 numpy==2.4.6
"$folder/env/bin/python" - <<'END'
import numpy as np
from gguf import GGMLQuantizationType, quants


def round_trip(values: list[float]) -> list[float]:
    block = np.zeros((1, 32), np.float32)
    block[0, : len(values)] = values
    with np.errstate(all="ignore"):
        packed = quants.quantize(block, GGMLQuantizationType.MXFP4)
    return quants.dequantize(packed, GGMLQuantizationType.MXFP4)[0, : len(values)].tolist()


halves = round_trip([6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25])
print("halves:", halves, " with NaN:", round_trip([float("nan"), 1, 6]))
assert halves == [6, 4, 3, 2, 1.5, 1, 0.5, 0], halves
assert round_trip([float("nan"), 1, 6]) == [0, 0, 0]
END
