"""Weights in the kernel layout to bfloat16, in a buffer that is reused for the next weight.

The result is the operand of the training matmuls: code x scale, which is exact in bfloat16 for the FP4 formats.
The matmul applies the tensor scale, as the decode GEMM does, so sampling and training multiply by the same numbers. The
reference is `operand` of each format's module, applied to `layout.unpack`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from qerl_kernels import nf4
from qerl_kernels.checks import require_device, require_shape
from qerl_kernels.layout import BLOCK, SCALE_TYPES, KernelWeight, shapes
from qerl_kernels.scratch import scratch

_KINDS = ("nvfp4", "mxfp4", "nf4", "fp8", "int8", "int4")  # index: FORMAT of the kernel


def dequantize(weight: KernelWeight, out: torch.Tensor | None = None) -> torch.Tensor:
    """The operand (N, K) of `weight` in bfloat16, written to `out` or to the shared scratch buffer.

    nvfp4 and mxfp4 are exact; others are code value x scale in FP32, rounded once. Raises ValueError if `out` is
    not bfloat16 (N, K), contiguous, and on the weight's device, or if K is odd.
    """
    rows, width = weight.shape
    if weight.format not in BLOCK or width % 2:
        raise ValueError(f"dequantize takes {', '.join(BLOCK)} of even width, got {weight.format} of width {width}")
    words_shape, scales_shape = shapes(weight.format, weight.shape)
    tiles, columns, *_ = words_shape
    require_shape("words", weight.words, words_shape, torch.int32)
    require_shape("scales", weight.scales, scales_shape, *SCALE_TYPES[weight.format])
    if out is None:
        out = scratch(weight.shape, torch.bfloat16, weight.words.device)
    require_shape("out", out, weight.shape, torch.bfloat16)
    require_device(words=weight.words, scales=weight.scales, out=out)
    from qerl_kernels import jit_dequantize

    bits = weight.scales.dtype == torch.bfloat16  # whose arithmetic is wrong in Triton's interpreter
    kernel: Any = jit_dequantize.dequantize
    kernel[(-(-columns // 4), tiles)](
        weight.words,
        weight.scales.view(torch.int16) if bits else weight.scales,
        _table(weight.words.device),
        out.view(torch.int32),
        rows,
        width // 2,
        columns,
        weight.offset,
        FORMAT=_KINDS.index(weight.format.partition("-")[0]),
        S=scales_shape[-1] if len(scales_shape) == 5 else 0,
        SHARED=columns // scales_shape[1] if BLOCK[weight.format] else 0,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


@cache
def _table(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(nf4.VALUES).to(device)
