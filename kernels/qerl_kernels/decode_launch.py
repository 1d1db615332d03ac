"""Launches the kernels of the decode GEMM, whose arguments `decode` and `grouped` have checked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch

from qerl_kernels import nf4
from qerl_kernels.decode_configs import WGMMA, Config
from qerl_kernels.layout import BLOCK, ROWS, KernelWeight
from qerl_kernels.overlap import overlapping
from qerl_kernels.scratch import COUNTERS, workspace

LoRA = tuple[torch.Tensor, torch.Tensor, float]  # x A^T (M, r) and B (N, r) in bfloat16, and the scaling

_MIN_RANK = 16  # K of a tensor-core instruction
_PART = 16  # tokens whose partial sums one program of `add_partials` adds


def launch(
    x: torch.Tensor,
    weight: KernelWeight,
    scale: torch.Tensor | float,
    bias: torch.Tensor | None,
    lora: LoRA | None,
    y: torch.Tensor,
    config: Config,
    parts: Sequence[int] = (),
    beside: bool = False,
) -> None:
    """Write `decode.decode_gemm` to y (M, N)."""
    from qerl_kernels import jit_decode, jit_decode_end, jit_decode_mma

    (m, n), k = y.shape, weight.shape[1]
    tiles, columns = weight.words.shape[:2]
    token_blocks = -(-m // config.tokens)
    blocks = -(-n // config.rows) * token_blocks
    partial, counters = workspace(x.device, blocks * config.split * config.rows * config.tokens * (config.split > 1))
    separate = config.separate or blocks > COUNTERS
    row_scale = scale if isinstance(scale, torch.Tensor) else None
    if not BLOCK[weight.format]:
        row_scale = weight.scales if row_scale is None else weight.scales.flatten()[:n] * row_scale
    factor = 2.0**weight.exponent * (1.0 if isinstance(scale, torch.Tensor) else scale)
    xa, b, scaling = lora if lora and lora[2] else (None, None, 0.0)  # the kernels divide by it
    rank = 0 if b is None else b.shape[1]
    own = rank // (len(parts) or 1)
    ends = [*accumulate(parts[:-1]), n, n][:2]
    shared = {
        "SPLIT": config.split,
        "RANK": 0 if b is None else max(_MIN_RANK, 1 << (own - 1).bit_length()),
        "HAS_ROW_SCALE": row_scale is not None,
        "HAS_BIAS": bias is not None,
        **overlapping(x.device),
    }
    limit = {} if config.registers is None else {"maxnreg": config.registers}
    tensors = (weight.words, weight.scale_words, nf4_table(x.device), row_scale, bias, xa, b, y, partial, counters)
    constants = {
        "FORMAT": weight.format, "BM": config.rows, "BN": config.tokens, "RING": config.ring, "XBUF": config.buffers,
        "SEPARATE": separate, "W": config.warps, "num_warps": config.warps, **shared, **limit,
    }  # fmt: skip
    multiply: Any
    if config.kernel == WGMMA:
        multiply = jit_decode.decode[(blocks, config.split)]
        multiply(
            _box(x, config), *tensors, None, factor, scaling, m, n, columns, tiles, rank, own, *ends, y.stride(0), 0,
            OVERLAP=config.overlap, EVEN=columns % config.ring == 0, BESIDE=beside, GROUPED=False, **constants,
        )  # fmt: skip
    else:
        multiply = jit_decode_mma.decode[(blocks, config.split)]
        multiply(
            x, *tensors, factor, scaling, m, n, k // 8, columns, tiles, rank, own, *ends, x.stride(0) // 8, y.stride(0),
            **constants,
        )  # fmt: skip
    if separate and config.split > 1:
        part = min(_PART, config.tokens)
        add: Any = jit_decode_end.add_partials[(blocks, config.rows // 64, config.tokens // part)]
        add(
            row_scale, bias, xa, b, y, partial, factor, scaling, m, n, rank, own, *ends, y.stride(0),
            BM=config.rows, BN=config.tokens, PART=part, WGMMA=config.kernel == WGMMA, num_warps=4, **shared,
        )  # fmt: skip


def launch_grouped(
    x: torch.Tensor,
    weight: KernelWeight,
    shape: tuple[int, int],
    items: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    config: Config,
) -> None:
    """Write `grouped.grouped_gemm` to y (S, N), for experts W (N, K) = `shape`; all arguments are checked there."""
    from qerl_kernels import jit_decode

    n = shape[0]
    tiles, columns = n // ROWS, weight.words.shape[1]
    blocks = -(-n // config.rows) * len(items)
    split = config.split if blocks <= COUNTERS else 1
    partial, counters = workspace(x.device, blocks * split * config.rows * config.tokens * (split > 1))
    multiply: Any = jit_decode.decode[(blocks, split)]
    multiply(
        _box(x, config), weight.words, weight.scale_words, nf4_table(x.device), scale,
        bias, None, None, y, partial, counters, items, 2.0**weight.exponent, 0.0, 0, n, columns, tiles, 0, 0, 0,
        0, n, len(items), FORMAT=weight.format, BM=config.rows, BN=config.tokens, SPLIT=split, RING=config.ring,
        XBUF=config.buffers, OVERLAP=config.overlap, SEPARATE=False, RANK=0, HAS_ROW_SCALE=scale is not None,
        HAS_BIAS=bias is not None, EVEN=columns % config.ring == 0, PDL=True, BESIDE=False, GROUPED=True,
        W=config.warps, num_warps=config.warps, launch_pdl=True,
    )  # fmt: skip


def _box(x: torch.Tensor, config: Config) -> Any:
    """What the copy engine needs to read blocks of the activations x."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(x, [config.tokens, 64 * config.ring], layout)


@cache
def nf4_table(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(nf4.VALUES).to(device).view(torch.int32)
