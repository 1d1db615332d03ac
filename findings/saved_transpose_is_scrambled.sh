#!/usr/bin/env bash
# safetensors 0.8.0 with numpy 2.4.6: safetensors.numpy.save writes a transposed, Fortran-ordered or strided array as its
# memory lies, with the shape that it has: what is loaded has other numbers in other places, and nothing is said.
# Guessed before: refused, as safetensors.torch does, or right.
# So what: weight.T or a slice of columns is saved as another matrix (safetensors/safetensors#825).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet numpy==2.4.6 safetensors==0.8.0
"$folder/env/bin/python" - <<'END'
import numpy as np
from safetensors.numpy import load, save

weight = np.arange(6, dtype=np.float32).reshape(2, 3)
for name, array in {"transposed": weight.T, "by columns": np.asfortranarray(weight), "a slice": weight[:, ::2]}.items():
    found = load(save({"weight": array}))["weight"]
    print(f"{name}: saved {array.tolist()}, loaded {found.tolist()}")
    assert found.shape == array.shape and not np.array_equal(found, array), name
    assert np.array_equal(load(save({"weight": np.ascontiguousarray(array)}))["weight"], array)
END
