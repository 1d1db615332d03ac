"""MXFP4 weights: E2M1 codes and a power-of-two scale (E8M0) per 32 inputs; no tensor scale.

Scale byte e means 2^(e - 127). The exponent is read from the bits of the block's maximum, so each rule is exact for any
input dtype. Left out: byte 255 (NaN) is never written, nor 253 and 254, with which code 6 would decode to infinity.
"""

from __future__ import annotations

from functools import cache

import torch

from qerl_kernels import e2m1

BLOCK = 32

# With max = m * 2^k and m in [1, 2), the block's exponent is k - 2, plus one if m reaches the rule's threshold. These
# numbers, added to the FP32 bits of the maximum, carry into the exponent exactly from that threshold on.
ROUND_UP = {
    "even": 1 << 21,  # m >= 1.75: round the maximum to E2M1's one mantissa bit (compressed-tensors; EVEN)
    "floor": 0,  # never: OCP Microscaling Formats 1.0, section 6.3; maxima above 6 * 2^(k-2) saturate
    "rceil": (1 << 22) - 1,  # m > 1.5: the smallest scale with which nothing saturates (cuBLAS)
}
_MAX_BYTE = 252


def scales(weight: torch.Tensor, scale_rule: str, stretch: float = 1.0) -> dict[str, torch.Tensor]:
    """`weight_scale` uint8 (N, K/32) of a finite W (N, K), K a multiple of 32, by a rule, a key of `ROUND_UP`.

    `stretch` multiplies the maxima before the rule is applied.
    """
    blocks = weight.to(torch.float32).unflatten(-1, (-1, BLOCK))  # (N, K/32, 32)
    amax_bits = (blocks.abs().amax(dim=-1) * stretch).view(torch.int32)  # (N, K/32)
    exponent = (amax_bits + ROUND_UP[scale_rule]) >> 23  # k + 127
    return {"weight_scale": (exponent - 2).clamp(0, _MAX_BYTE).to(torch.uint8)}


def unit(scales: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight that code value 1 represents, FP32 (N, K/32)."""
    scale_byte = scales["weight_scale"]
    return e2m1.lookup(_scale_table(scale_byte.device, torch.float32), scale_byte)


def encode(weight: torch.Tensor, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the packed W (N, K): `scales`, unchanged, and `weight_packed` uint8 (N, K/2)."""
    scaled = weight.to(torch.float32).unflatten(-1, (-1, BLOCK)) / unit(scales).unsqueeze(-1)
    return {"weight_packed": e2m1.pack_pairs(e2m1.encode(scaled.flatten(-2))), **scales}


def pack(weight: torch.Tensor, scale_rule: str) -> dict[str, torch.Tensor]:
    """Quantize a finite W (N, K), K a multiple of 32, to `weight_packed` uint8 (N, K/2) and `weight_scale` (N, K/32).

    `scale_rule` is a key of `ROUND_UP`. "even" gives the bytes of compressed-tensors' MXFP4A16 for bfloat16 and float32
    weights. For float16 that library keeps scales in float16, so scales below 2^-24, as of zero blocks, become 1; here
    they do not.
    """
    return encode(weight, scales(weight, scale_rule))


@cache
def _scale_table(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """2^(byte - 127), (256,); float32 and bfloat16 hold all but the last, which is NaN by the standard."""
    with torch.inference_mode(False):
        table = torch.exp2(torch.arange(256, dtype=torch.float64) - 127)
        table[255] = torch.nan
        return table.to(dtype).to(device)


def operand(weight_packed: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight, code x 2^(byte - 127), (N, K): exact in bfloat16 and float32.

    float16 is rounded from float32: exact for magnitudes in [2^-14, 65504], as a float16 checkpoint would hold them.
    """
    if dtype == torch.float16:
        return operand(weight_packed, weight_scale, torch.float32).to(dtype)
    scales = e2m1.lookup(_scale_table(weight_scale.device, dtype), weight_scale)
    return e2m1.scale_blocks_(e2m1.decode(weight_packed, dtype), scales)
