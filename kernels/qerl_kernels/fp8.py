"""FP8 by FP8: inputs rounded to E4M3 times a weight in E4M3, both with a scale for each row.

They are what `activations` and `symmetric` round to. Sums are scaled, and get the bias, before the only rounding. The
gradient of an input may be FP8 by FP8 too (`input_gradient`). Left out: scales of squares and of tensors.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from qerl_kernels import symmetric
from qerl_kernels.checks import interpreting
from qerl_kernels.overlap import overlapping
from qerl_kernels.scratch import scratch

FAST_SUMS = True  # with fewer bits than FP32: benchmarks/fp8.py says how far off
LEAST_CAPABILITY = (8, 9)
_CODES = symmetric.CODES["fp8"]
_MOST = 2048
DEQUANTIZED = 2048  # codes of a program, 16 of each thread
TRANSPOSED = 128  # rows and columns of a program


def why_not(shape: tuple[int, int], capability: tuple[int, int]) -> str | None:
    """Why a card of this compute capability cannot multiply by codes of W (N, K), or None if it can."""
    if capability < LEAST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} multiplies no FP8, 8.9 is the first that does"
    return f"a width of {shape} is no multiple of 16" if any(size % 16 for size in shape) else None


def quantize(
    x: torch.Tensor,
    counts: torch.Tensor,
    fused: bool = True,
    skipped: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of x (M, K), float8_e4m3fn, and the scale of each row, FP32 (M, 1): NaN where an input is not finite.

    Arguments are those of `round_rows`. With `factors`, FP32 (K,), they are codes of x * factors, rounded to bfloat16.
    One kernel does it if `fused`, on a GPU, for inputs of 16 bits.
    """
    if not (fused and (x.is_cuda or interpreting()) and x.dtype.itemsize == 2) or x.numel() == 0:
        x = x if factors is None else (x.float() * factors).bfloat16()
        scale = symmetric.scales(x, _CODES, (1, x.shape[1]), x.dtype, "torchao")
        codes = symmetric.encode(x, scale, _CODES, 1, x.dtype, "torchao")["weight"]
        inputs = x != 0 if skipped is None else (x != 0) & (skipped == 0)[:, None]
        counts += torch.stack([(inputs & (codes.float() == 0)).sum(), inputs.sum()])
        return codes, scale["weight_scale"]
    from qerl_kernels import jit_fp8

    x = x.contiguous()
    rows, width = x.shape
    codes, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty((rows, 1), dtype=torch.float32)
    part, warps = part_of(width)
    kernel: Any = jit_fp8.quantize_row
    kernel[(rows,)](
        x, codes.view(torch.uint8), scales, counts, counts if skipped is None else skipped,
        scales if factors is None else factors, width,
        EPSILON=torch.finfo(x.dtype if factors is None else torch.bfloat16).eps, PART=part, PARTS=-(-width // part),
        SKIPS=skipped is not None, FACTORS=factors is not None, CONVERTS=x.is_cuda, num_warps=warps,
        enable_fp_fusion=False, **overlapping(x.device),
    )  # fmt: skip
    return codes, scales


def multiply(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None,
    fast_sums: bool = FAST_SUMS,
) -> torch.Tensor:  # fmt: skip
    """y (M, N) in bfloat16 of codes x (M, K) and W (N, K) with FP32 scales (M, 1) and (N, 1), plus `bias` (N,)."""
    added = None if bias is None else bias.to(torch.bfloat16)
    scaled: Any = torch._scaled_mm  # type: ignore[attr-defined]
    return scaled(x, weight.t(), x_scales, scales.t(), added, out_dtype=torch.bfloat16, use_fast_accum=fast_sums)


def dequantize(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, fused: bool = True) -> torch.Tensor:
    """Code x scale of W (N, K) and FP32 scales (N, 1), rounded once to `dtype`, in the scratch buffer.

    One kernel does it if `fused`, on a GPU, to bfloat16: PyTorch's own conversion of E4M3 took ten times as long.
    """
    out = scratch(tuple(weight.shape), dtype, weight.device)
    if not (fused and (weight.is_cuda or interpreting()) and dtype == torch.bfloat16):
        return out.copy_(weight).mul_(scales)
    from qerl_kernels import jit_fp8

    rows, width = weight.shape
    kernel: Any = jit_fp8.dequantize_row
    kernel[(rows, -(-width // DEQUANTIZED))](
        weight.view(torch.uint8), scales, out.view(torch.int16), width, PART=DEQUANTIZED, num_warps=4
    )
    return out


def input_gradient(
    gradient: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, counts: torch.Tensor, multiplies: bool
) -> torch.Tensor:
    """dX = dY W (M, K), in the dtype of dY (M, N), of which each row is rounded to E4M3 with a scale of its own.

    W (N, K) has codes and a scale (N, 1) for each row. dX sums over these rows, so their scales cannot follow the sum:
    they multiply dY before it is rounded, and the codes of W need no other scale and no second rounding. If the card
    `multiplies`, `torch._scaled_mm` reads W's codes as (K, N), transposed to the scratch buffer in each call, since its
    operands must be contiguous along the sum; otherwise the rounded numbers are multiplied in the dtype of dY.
    `counts` are those of `round_rows`: of products of dY with scales.
    """
    codes, of_rows = quantize(gradient, counts, factors=scales.float().flatten())
    if not multiplies:
        return (codes.float() * of_rows).to(gradient.dtype) @ weight.to(gradient.dtype)
    return multiply(codes, of_rows, transpose(weight), _ones(weight.shape[1], weight.device), None)


def transpose(weight: torch.Tensor, fused: bool = True) -> torch.Tensor:
    """Codes (N, K) as a contiguous (K, N), in the scratch buffer; by one kernel if `fused`, on a GPU."""
    rows, width = weight.shape
    out = scratch((width, rows), weight.dtype, weight.device)
    if not (fused and (weight.is_cuda or interpreting())):
        return out.copy_(weight.t())
    from qerl_kernels import jit_fp8

    kernel: Any = jit_fp8.transpose
    kernel[(-(-rows // TRANSPOSED), -(-width // TRANSPOSED))](
        weight.view(torch.uint8), out.view(torch.uint8), rows, width, TILE=TRANSPOSED, num_warps=8
    )
    return out


@cache
def _ones(size: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.ones(size, 1, device=device)


def part_of(width: int) -> tuple[int, int]:
    """Inputs that a program holds at a time, and its warps."""
    part = min(_MOST, 1 << (width - 1).bit_length())
    return part, max(1, part // 256)
