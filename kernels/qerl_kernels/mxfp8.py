"""MXFP8 weights: E4M3 codes and a power-of-two scale (E8M0) per 32 inputs; no tensor scale.

Scale byte e means 2^(e - 127). The scale is the largest power of two up to the block's maximum, over 2^8, that of E4M3
(OCP Microscaling Formats 1.0, section 6.3; "floor" in torchao). Maxima above 448 times their scale saturate.

E8M0 has neither 0 nor anything below 2^-127: blocks of zeros, and of maxima below 2^-118, have byte 0, and codes for
that scale. No finite maximum needs a byte above 246. Left out: other rules, E5M2 codes, and byte 255 (NaN).
"""

from __future__ import annotations

import torch

from qerl_kernels import e2m1, mxfp4, symmetric

BLOCK = 32
_CODES = symmetric.CODES["fp8"]
_EXPONENT = 8  # of 256, the largest power of two in E4M3
_MAX_BYTE = 246  # with it code 448 decodes to less than 2^128, and with the next to more


def scales(weight: torch.Tensor, stretch: float = 1.0) -> dict[str, torch.Tensor]:
    """`weight_scale` uint8 (N, K/32) of a finite W (N, K), K a multiple of 32; `stretch` multiplies the maxima."""
    amax = weight.to(torch.float32).unflatten(-1, (-1, BLOCK)).abs().amax(dim=-1) * stretch  # (N, K/32)
    exponent = amax.view(torch.int32) >> 23  # of the power of two, + 127
    return {"weight_scale": (exponent - _EXPONENT).clamp(0, _MAX_BYTE).to(torch.uint8)}


def unit(scales: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight that code value 1 represents, FP32 (N, K/32)."""
    return mxfp4.unit(scales)


def nearest(values: torch.Tensor) -> torch.Tensor:
    """The E4M3 value nearest to each value, ties to even, saturating at 448; FP32 of the same shape."""
    return symmetric.nearest(values, _CODES)


def encode(weight: torch.Tensor, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the packed W (N, K): `scales`, unchanged, and `weight` float8_e4m3fn (N, K).

    -0.0 keeps its sign. These are the bytes of torchao 0.18 where the scale byte is not 0. Where it is, torchao divides
    by 2^-126, restores with 2^-127, and so halves the weights.
    """
    blocks = weight.to(torch.float32).unflatten(-1, (-1, BLOCK))
    codes = nearest(blocks / unit(scales).unsqueeze(-1)).flatten(-2)
    return {"weight": codes.to(torch.float8_e4m3fn), **scales}


def pack(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantize a finite W (N, K), K a multiple of 32, to `weight` (N, K) and `weight_scale` (N, K/32)."""
    return encode(weight, scales(weight))


def operand(packed: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The weight, code x 2^(byte - 127), (N, K): exact in float32, and from 2^-130 on in bfloat16.

    float16 is rounded, and infinite beyond its range.
    """
    return e2m1.scale_blocks_(packed["weight"].to(torch.float32), unit(packed)).to(dtype)
