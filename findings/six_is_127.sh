#!/usr/bin/env bash
# jax 0.10.2 on a CPU: 6 in FP4 cast to an integer is the largest one, -6 the smallest. By way of float32, and in NumPy, 6 is 6.
# Guessed before: 6. So what: most blocks have a 6, and nothing is said. Python 3.11 or later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jax==0.10.2 ml_dtypes==0.6.0 numpy==2.4.6
"$folder/env/bin/python" - <<'END'
import jax
import jax.numpy as jnp

right = [0, 1, 2, 3, 4, 6, -4, -6]
x = jnp.array(right, jnp.float4_e2m1fn)
for kind in (jnp.int4, jnp.int8, jnp.int32):
    found, info = x.astype(kind).tolist(), jnp.iinfo(kind)
    print(found)
    assert found == [*right[:5], info.max, -4, info.min]
    assert right == x.astype(jnp.float32).astype(kind).tolist() == jax.device_get(x).astype(kind).tolist()
END
