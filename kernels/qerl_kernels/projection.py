"""x A^T of an adapter for few rows, as in sampling: one kernel where a library takes two.

A has few rows, so only many pieces of K keep a GPU busy. The pieces depend on the shape of A alone, and the last
program to finish adds all partial sums in their order: two runs give the same bits, whatever the other rows are. Left
out: gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from qerl_kernels.checks import require_device, require_shape
from qerl_kernels.decode import kernel_of
from qerl_kernels.decode_configs import WGMMA
from qerl_kernels.decoder_layer import FLOATS
from qerl_kernels.overlap import overlapping
from qerl_kernels.scratch import workspace

MAX_ROWS, MAX_RANK = 256, 256
MOST_INPUTS = 1 << 19  # numbers of x up to which a library was slower (kernels/results/h200_projection.csv)
BESIDE_ROWS = 256  # rows up to which the decode GEMM runs beside `project`, not behind it; 0: it never does
_ALWAYS_BESIDE = 64  # rows up to which it does even where a library was faster: nobody waits for x A^T then
_TILE = 16  # rows of x, and of A, of a program
_COLUMNS = 64  # inputs that a program multiplies at once
_PROGRAMS = 100  # about so many at least, if K allows
_MOST_PIECES = 64  # whose sums one program adds


def pays(x: torch.Tensor, a: torch.Tensor) -> bool:
    """Whether `project` takes these sizes and is faster than a library: 1.1 to 1.7 times on an H200."""
    return 0 < len(x) <= MAX_ROWS and 0 < len(a) <= MAX_RANK and x.numel() <= MOST_INPUTS


def runs_beside(x: torch.Tensor, a: torch.Tensor) -> bool:
    """Whether `decode_gemm` of x and its weight is to run while `project` computes x A^T."""
    rows = len(x)
    wanted = pays(x, a) or (0 < rows <= _ALWAYS_BESIDE and 0 < len(a) <= MAX_RANK)
    return rows <= BESIDE_ROWS and wanted and kernel_of(x.device) == WGMMA


def project(x: torch.Tensor, a: torch.Tensor, beside: bool = False) -> torch.Tensor:
    """x A^T (M, R) for x (M, K) and A (R, K) of one dtype, summed in FP32 and rounded once; M and R up to 256.

    With `beside` the next kernel may start when x is complete, but not before: it may read x at once, and must wait for
    the result, and before it writes anything. Otherwise it may start at once, and must wait for both (`overlap`).
    """
    rows, width = x.shape
    require_shape("x", x, (rows, width), *FLOATS)
    require_shape("A", a, (-1, width), x.dtype)
    require_device(x=x, A=a)
    if not 0 < rows <= MAX_ROWS or not 0 < len(a) <= MAX_RANK:
        raise ValueError(
            f"x must have 1 to {MAX_ROWS} rows and A 1 to {MAX_RANK}, got {rows} and {len(a)}; use x @ a.t()"
        )
    y = x.new_empty(rows, len(a))
    _launch(x, a, y, beside)
    return y


def _launch(x: torch.Tensor, a: torch.Tensor, y: torch.Tensor, beside: bool = False) -> None:
    from qerl_kernels import jit_projection

    (rows, rank), width = y.shape, x.shape[1]
    inputs, pieces = pieces_of(rank, width)
    blocks = -(-rows // _TILE), -(-rank // _TILE)
    partial, counters = workspace(x.device, blocks[0] * blocks[1] * pieces * _TILE * _TILE)
    kernel: Any = jit_projection.project
    kernel[(*blocks, pieces)](
        x, a, y, partial, counters, rows, rank, width, INPUTS=inputs, PIECES=pieces, TILE=_TILE, COLUMNS=_COLUMNS,
        BESIDE=beside, num_warps=4, num_stages=6, **overlapping(x.device),
    )  # fmt: skip


def pieces_of(rank: int, width: int) -> tuple[int, int]:
    """How many inputs a piece of K = `width` has, and how many pieces there are."""
    columns, rank_blocks = -(-width // _COLUMNS), -(-rank // _TILE)
    each = max(1, columns * rank_blocks // _PROGRAMS, -(-columns // _MOST_PIECES))
    return each * _COLUMNS, -(-columns // each)
