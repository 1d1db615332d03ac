#!/usr/bin/env bash
# safetensors 0.8.0 with ml_dtypes 0.6.0: safetensors.numpy saves arrays of bfloat16, float8_e4m3fn and float8_e8m0fnu,
# and cannot load what it has saved: KeyError with the name of the type. int4 it refuses to save.
# Guessed before: both ways work, or both are refused.
# So what: a converter without PyTorch finds out when somebody reads its file. Needs Python 3.11 or later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet ml_dtypes==0.6.0 numpy==2.4.6 safetensors==0.8.0
"$folder/env/bin/python" - <<'END'
import ml_dtypes
import numpy as np
from safetensors.numpy import load, save

for name, key in (("bfloat16", "BF16"), ("float8_e4m3fn", "F8_E4M3"), ("float8_e8m0fnu", "F8_E8M0")):
    written = save({"a": np.ones((2, 2), getattr(ml_dtypes, name))})
    try:
        load(written)
    except KeyError as error:
        print(name, "saved, and loading it raises KeyError", error)
        assert error.args == (key,), error
    else:
        raise AssertionError(f"{name} is read now")
END
