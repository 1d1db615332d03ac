"""Weights in the kernel layout to bfloat16, in a buffer that is reused for the next weight.

The result is the operand of the training matmuls: code x block scale, which is exact in bfloat16 for the FP4 formats.
The matmul applies the tensor scale, as the decode GEMM does, so sampling and training multiply by the same numbers. The
reference is `operand` of each format's module, applied to `layout.unpack`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from qerl_kernels import nf4
from qerl_kernels.checks import require_device, require_shape
from qerl_kernels.layout import BLOCK, INPUTS, ROWS, KernelWeight
from qerl_kernels.scratch import scratch

_FORMATS = ("nvfp4", "mxfp4", "nf4")  # index: FORMAT of the kernel


def dequantize(weight: KernelWeight, out: torch.Tensor | None = None) -> torch.Tensor:
    """The operand (N, K) of `weight` in bfloat16, written to `out` or to the shared scratch buffer.

    nvfp4 and mxfp4 are exact; nf4 is code value x block maximum in FP32, rounded once. Raises ValueError if `out` is
    not bfloat16 (N, K), contiguous, and on the weight's device, or if K is odd.
    """
    rows, width = weight.shape
    tiles, columns = -(-rows // ROWS), -(-width // INPUTS)
    if weight.format not in _FORMATS or width % 2:
        raise ValueError(f"dequantize takes {', '.join(_FORMATS)} of even width, got {weight.format} of width {width}")
    per_tile = INPUTS // BLOCK[weight.format]
    scale_type = torch.float32 if weight.format == "nf4" else torch.uint8
    require_shape("words", weight.words, (tiles, columns, 32, 4), torch.int32)
    require_shape("scales", weight.scales, (tiles, columns, 8, 2, per_tile), scale_type)
    if out is None:
        out = scratch(weight.shape, torch.bfloat16, weight.words.device)
    require_shape("out", out, weight.shape, torch.bfloat16)
    require_device(words=weight.words, scales=weight.scales, out=out)
    from qerl_kernels import jit_dequantize

    kernel: Any = jit_dequantize.dequantize
    kernel[(-(-columns // 4), tiles)](
        weight.words,
        weight.scales,
        _table(weight.words.device),
        out.view(torch.int32),
        rows,
        width // 2,
        columns,
        weight.offset,
        FORMAT=_FORMATS.index(weight.format),
        S=per_tile,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


@cache
def _table(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(nf4.VALUES).to(device)
