#!/usr/bin/env bash
# krippendorff 0.9.0: alpha of scores in an unsigned type takes 3 - 5 as 254 (uint8), at interval (the default) and ratio. Three
# judges who err by up to 5 of 100 have 0.99 as int64, int8 or floats, -0.13 as uint8; in points of 10, 0.98 and 0.60. No warning.
# Guessed before: the same, as distances are floats, by its argument dtype. They become floats after the difference.
# So what: `pandas.to_numeric(downcast="unsigned")` makes good judges bad. Pass floats. Python 3.11 or later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet krippendorff==0.9.0 numpy==2.4.6
"$folder/env/bin/python" - <<'END'
import krippendorff
import numpy as np

rng = np.random.default_rng(0)
truth = rng.integers(0, 101, 200)
hundred = np.clip(truth + rng.integers(-5, 6, (3, 200)), 0, 100)
for scores, low in ((np.round(hundred / 10), 0.65), (hundred, 0)):
    for level in ("nominal", "ordinal", "interval"):
        found = {
            kind: float(krippendorff.alpha(scores.astype(kind), level_of_measurement=level))
            for kind in ("float64", "int64", "int8", "uint16", "uint8")
        }
        print(level, found)
        right = found["float64"]
        assert abs(found["int64"] - right) + abs(found["int8"] - right) < 1e-9
        assert (found["uint8"] < low < 0.9 < right) if level == "interval" else found["uint8"] == right
END
