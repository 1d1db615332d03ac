#!/usr/bin/env bash
# bitsandbytes 0.50.2 with torch 2.13.0 on a CPU: dequantize_4bit gives a vector of n numbers back as (1, n) if n is even, and as
# (n,) if it is odd; two numbers come back as (2, 1). Matrices and 8-bit blocks keep their shapes.
# Guessed before: the shape that was packed, which its QuantState has. Known as bitsandbytes-foundation/bitsandbytes#2047.
# So what: whether code that packs biases or norms in 4 bits gets vectors back depends on their length. Python 3.11 or later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet bitsandbytes==0.50.2 torch==2.13.0 numpy==2.4.6
"$folder/env/bin/python" - 2>"$folder/words" <<'END' || { cat "$folder/words"; exit 1; }
import torch
from bitsandbytes.functional import dequantize_4bit, dequantize_blockwise, quantize_4bit, quantize_blockwise


def back(*shape: int) -> tuple[int, ...]:
    packed, state = quantize_4bit(torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape), quant_type="nf4", blocksize=64)
    assert tuple(state.shape) == shape
    return tuple(dequantize_4bit(packed, state).shape)


for length in (2, 63, 64, 65, 128):
    print(f"({length},) comes back as {back(length)}")
assert back(2) == (2, 1)
assert all(back(even) == (1, even) for even in (4, 64, 66, 128))
assert all(back(odd) == (odd,) for odd in (63, 65, 127))
assert all(back(*shape) == shape for shape in ((1, 64), (64, 1), (3, 64), (2, 3, 64)))
assert dequantize_blockwise(*quantize_blockwise(torch.ones(64))).shape == (64,)
END
