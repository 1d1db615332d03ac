"""Inputs of matmuls rounded to a format of few bits and back, each token by itself: the reference of W4A4 and W8A8.

Nothing depends on the other tokens of a batch. NVFP4 has a tensor scale for each token, with the arithmetic of torchao
on that token alone; MXFP4 its even rule; FP8 and INT8 a scale for each token. The scales are those of the largest
magnitudes, computed anew; what is not finite stays so. Left out: matmuls of the codes themselves, which accumulate
otherwise, and scales from calibration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qerl_kernels import e2m1, mxfp4, nvfp4, symmetric
from qerl_kernels.checks import interpreting
from qerl_kernels.decoder_layer import FLOATS
from qerl_kernels.overlap import overlapping

MOST_INPUTS = 32768  # of a row that one program of the kernel holds

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
# What the largest magnitude of a row is divided by for its scale.
SPANS = {"nvfp4": nvfp4.E4M3_MAX * e2m1.MAX, **{name: symmetric.CODES[name].span for name in ("fp8", "int8")}}


def round_blocks(x: torch.Tensor, kind: str) -> torch.Tensor:
    """x (..., K) rounded to the format `kind`, a key of `KINDS`, in the dtype of x.

    K is a multiple of 16 for nvfp4, and of 32 for mxfp4.
    """
    if x.numel() == 0:
        return x
    values, unit = KINDS[kind](x.reshape(-1, x.shape[-1]))
    rounded = (values * unit.unsqueeze(-1)).view(x.shape).to(x.dtype)
    return torch.where(x.isfinite(), rounded, x)


def fallen_back(x: torch.Tensor, kind: str) -> torch.Tensor:
    """How many rows of x (..., K), int64 (), get no scale from their largest magnitude: it is 0, or too small for one.

    Their scale is then 1 if `kind` is nvfp4, and an epsilon if it is fp8 or int8.
    """
    largest = x.abs().amax(dim=-1).to(torch.float32 if kind == "nvfp4" else x.dtype)
    wanted = largest / largest.new_full((), SPANS[kind])
    return (wanted < torch.finfo(torch.float32).eps if kind == "int8" else wanted == 0).sum()


def round_rows(
    x: torch.Tensor, kind: str, counts: torch.Tensor, fused: bool = True, skipped: torch.Tensor | None = None
) -> torch.Tensor:
    """`round_blocks`, which adds to `counts` int64 (2,) how many inputs became zero, of how many that were not.

    Rows of x (M, K) where `skipped` int64 (M,) is not 0 are rounded and not counted. One kernel does all of it if
    `fused`, on a GPU, for bfloat16, float16 and float32 and K up to `MOST_INPUTS`.
    """
    width = x.shape[-1]
    runs = (x.device.type == "cuda" or interpreting()) and x.dtype in FLOATS and width <= MOST_INPUTS
    if not (fused and runs) or x.numel() == 0:
        rounded, inputs = round_blocks(x, kind), x != 0
        if skipped is not None:
            inputs = (inputs.view(-1, width) & (skipped == 0)[:, None]).view(x.shape)
        counts += torch.stack([(inputs & (rounded == 0)).sum(), inputs.sum()])
        return rounded
    x = x.contiguous()
    y = torch.empty_like(x)
    _launch(x, y, kind, counts, skipped)
    return y


def shape_of(kind: str, width: int) -> tuple[int, int, int]:
    """How a program holds K = `width`: the inputs of a block, how many blocks, and warps."""
    block = nvfp4.BLOCK if kind == "nvfp4" else mxfp4.BLOCK
    blocks = 1 << (-(-width // block) - 1).bit_length()
    return block, blocks, min(32, max(1, block * blocks // 512))


def _launch(x: torch.Tensor, y: torch.Tensor, kind: str, counts: torch.Tensor, skipped: torch.Tensor | None) -> None:
    from qerl_kernels import jit_activations

    width = x.shape[-1]
    block, blocks, warps = shape_of(kind, width)
    kernel: Any = jit_activations.round_row
    kernel[(x.numel() // width,)](
        x, y, counts, counts if skipped is None else skipped, width,
        KIND=kind, EPSILON=torch.finfo(x.dtype).eps, B=block, BLOCKS=blocks, SKIPS=skipped is not None,
        num_warps=warps, enable_fp_fusion=False, **overlapping(x.device),
    )  # fmt: skip
