#!/usr/bin/env bash
# compressed-tensors 0.20.1, beside torchao 0.18.0: its MXFP8 (E4M3) doubles a block's scale for maxima from 1.75 x 2^k
# on, as its MXFP4 does. For MXFP4 and MXFP6 it rounds maxima to the element's own mantissa, which is torchao's "even".
# Guessed before: the same in MXFP8, so from 1.9375 on, or the floor of the OCP specification, which never doubles.
# Maxima above 1.75 gain by it: 1.9375 comes back as 2, and clipped to 1.75 with the floor. The price is the smallest code,
# and 1.75, which the floor holds exactly, pays it for nothing: 2^-17 beside it comes back as 0. The rest is as in "rceil".
# So what: its scale bytes are those of no mode of torchao. Python 3.11 or later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet compressed-tensors==0.20.1 torchao==0.18.0 torch==2.13.0 transformers==5.24.0 \
    numpy==2.4.6
"$folder/env/bin/python" - <<'END'
import torch
from compressed_tensors.compressors import MXFP8QuantizationCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3
from torchao.prototype.mx_formats.mx_tensor import MXTensor

# one block for each maximum in [1, 2) that BF16 has
maxima = 1 + torch.arange(128) / 128
blocks = maxima[:, None].repeat(1, 32).to(torch.bfloat16)


def own_scale(block: torch.Tensor, name: str) -> torch.Tensor:
    arguments = preset_name_to_scheme(name, ["Linear"]).weights
    return calculate_qparams(block.amin(-1, keepdim=True), block.amax(-1, keepdim=True), arguments)[0]


def doubled(scale: torch.Tensor) -> list[float]:
    """The maxima whose scale is twice that of 1."""
    scale = scale.float().flatten()
    assert set((scale / scale[0]).tolist()) <= {1, 2}
    return maxima[scale == 2 * scale[0]].tolist()


def first(values: list[float]) -> float | str:
    return min(values, default="never")


def peer(elements, mode: str) -> list[float]:
    return doubled(MXTensor.to_mx(blocks, elements, 32, ScaleCalculationMode(mode)).scale)


kinds = {"MXFP4A16": torch.float4_e2m1fn_x2, "MXFP6A16": DTYPE_FP6_E2M3, "MXFP8A16": torch.float8_e4m3fn}
found = {name: (first(doubled(own_scale(blocks, name))), first(peer(kind, "even"))) for name, kind in kinds.items()}
for name, (own, even) in found.items():
    print(f"{name}: scales double from {own} on, in torchao's even from {even} on")
assert found == {"MXFP4A16": (1.75, 1.75), "MXFP6A16": (1.9375, 1.9375), "MXFP8A16": (1.75, 1.9375)}
own = set(doubled(own_scale(blocks, "MXFP8A16")))
others = {mode.value: sorted(own ^ set(peer(torch.float8_e4m3fn, mode.value))) for mode in ScaleCalculationMode}
print("MXFP8, maxima of other scales than in torchao:", {mode: len(values) for mode, values in others.items()})
assert not peer(torch.float8_e4m3fn, "floor") and all(others.values())
assert others["rceil"] == [1.75]

scheme = preset_name_to_scheme("MXFP8A16", ["Linear"])


def read_back(values: list[float], part: float) -> list[float]:
    """A block that begins with `values`, packed with `part` of the scale that the package chooses."""
    block = torch.zeros(1, 32, dtype=torch.bfloat16)
    block[0, : len(values)] = torch.tensor(values)
    state = {"weight": block, "weight_scale": own_scale(block, "MXFP8A16") * part}
    packed = MXFP8QuantizationCompressor.compress(state, scheme)
    return MXFP8QuantizationCompressor.decompress(packed, scheme)["weight"][0, : len(values)].tolist()


for values, chosen, floor in (
    ([1.9375, 2.0**-16], [2, 2.0**-16], [1.75, 2.0**-16]),
    ([1.75, 2.0**-17], [1.75, 0], [1.75, 2.0**-17]),
):
    print(values, "chosen scale:", read_back(values, 1), " floor, half of it:", read_back(values, 0.5))
    assert read_back(values, 1) == chosen and read_back(values, 0.5) == floor
END
