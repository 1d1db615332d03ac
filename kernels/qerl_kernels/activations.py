"""Inputs of matmuls rounded to a format of few bits and back, each token by itself: the reference of W4A4 and W8A8.

Nothing depends on the other tokens of a batch. NVFP4 has a tensor scale for each token, with the arithmetic of torchao
on that token alone; MXFP4 its even rule; FP8 and INT8 a scale for each token. The scales are those of the largest
magnitudes, computed anew; what is not finite stays so. Left out: matmuls of the codes themselves, which accumulate
otherwise, and scales from calibration.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from qerl_kernels import e2m1, mxfp4, nvfp4, symmetric

# Rows x (M, K) to the grid values of their blocks (M, K/B, B), and the units of these, FP32 (M, K/B).
Encode = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _nvfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = x.to(torch.float32).unflatten(-1, (-1, nvfp4.BLOCK))
    block_amax = blocks.abs().amax(dim=-1)
    of_token = block_amax.amax(dim=-1, keepdim=True) / block_amax.new_tensor(nvfp4.E4M3_MAX * e2m1.MAX)  # (M, 1)
    of_token = torch.where(of_token == 0, 1.0, of_token)
    wanted = block_amax / block_amax.new_tensor(e2m1.MAX) / of_token
    scale = wanted.clamp(nvfp4.E4M3_MIN_NORMAL, nvfp4.E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    reciprocal = of_token.reciprocal() / scale
    return e2m1.nearest(blocks * reciprocal.unsqueeze(-1)), scale * of_token


def _mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    unit = mxfp4.unit(mxfp4.scales(x, "even"))
    blocks = x.to(torch.float32).unflatten(-1, (-1, mxfp4.BLOCK))
    return e2m1.nearest(blocks / unit.unsqueeze(-1)), unit


def _symmetric(name: str) -> Encode:
    codes = symmetric.CODES[name]

    def encoded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = symmetric.scales(x, codes, (1, x.shape[1]), x.dtype, "torchao")
        packed = symmetric.encode(x, scales, codes, 1, x.dtype, "torchao")
        return symmetric.values(packed, codes, torch.float32).unsqueeze(1), scales["weight_scale"]

    return encoded


KINDS: dict[str, Encode] = {
    "nvfp4": _nvfp4,
    "mxfp4": _mxfp4,
    "fp8": _symmetric("fp8"),
    "int8": _symmetric("int8"),
}


def round_blocks(x: torch.Tensor, kind: str) -> torch.Tensor:
    """x (..., K) rounded to the format `kind`, a key of `KINDS`, in the dtype of x.

    K is a multiple of 16 for nvfp4, and of 32 for mxfp4.
    """
    if x.numel() == 0:
        return x
    values, unit = KINDS[kind](x.reshape(-1, x.shape[-1]))
    rounded = (values * unit.unsqueeze(-1)).view(x.shape).to(x.dtype)
    return torch.where(x.isfinite(), rounded, x)
