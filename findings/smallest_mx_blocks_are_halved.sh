#!/usr/bin/env bash
# torchao 0.18.0 in torch 2.13.0 on a CPU: MX blocks whose scale byte is 0 come back at half their values in its modes
# floor, ceil and even, and as zeros in rceil. For E4M3 and floor those are blocks of maxima below 2^-118, down to 2^-126
# normal numbers of BF16. They are divided by 2^-126, and byte 0 means 2^-127. Guessed before: the values, or zeros.
# Issue 1104 of pytorch/ao asks for it, and the package's texts do not name it.
# So what: the codes are those of half the values, so a reader by the specification gets halves too. Compare codes where
# the byte is not 0. Python 3.11 or later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torchao==0.18.0 torch==2.13.0 numpy==2.4.6
"$folder/env/bin/python" - <<'END'
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor


def kept(value: float, mode: ScaleCalculationMode) -> tuple[int, float]:
    """The scale byte of 32 equal values, and what of them is read back."""
    block = torch.full((1, 32), value, dtype=torch.bfloat16)
    assert bool((block == value).all())
    packed = MXTensor.to_mx(block, torch.float8_e4m3fn, 32, mode)
    ratios = packed.dequantize(torch.float32).double() / value
    assert ratios.min() == ratios.max()
    return int(packed.scale.view(torch.uint8)), float(ratios[0, 0])


found = {mode.value: (kept(2.0**-118, mode), kept(2.0**-120, mode)) for mode in ScaleCalculationMode}
for mode, ((byte, part), (small_byte, small_part)) in found.items():
    print(f"{mode}: 2^-118 has byte {byte}, {part} of it kept; 2^-120 has byte {small_byte}, {small_part} of it kept")
assert kept(1.875 * 2.0**-119, ScaleCalculationMode.FLOOR) == (0, 0.5)  # just below 2^-118
assert all(normal == (1, 1) for normal, _ in found.values())
assert {mode: small for mode, (_, small) in found.items()} == {
    "floor": (0, 0.5),
    "rceil": (0, 0),
    "ceil": (0, 0.5),
    "even": (0, 0.5),
}
END
