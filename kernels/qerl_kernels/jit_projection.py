"""Triton kernel of `projection`: one program per tile of the output and piece of K."""

import triton
import triton.language as tl

from qerl_kernels.jit_overlap import wait_for_earlier


@triton.jit(do_not_specialize=["rows"])
def project(
    x, a, y, partial, counters, rows, rank, width,
    INPUTS: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """TILE rows of x (M, K) times TILE rows of A (R, K) over INPUTS of K; the last piece to arrive adds all.

    If BESIDE, the next kernel starts when x is complete.
    """
    wait_for_earlier(PDL, BESIDE)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    component = tl.program_id(1) * TILE + tl.arange(0, TILE)
    piece = tl.program_id(2)
    sums = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, INPUTS, COLUMNS):
        column = piece * INPUTS + start + tl.arange(0, COLUMNS)
        inside = column < width
        x_mask, a_mask = (row < rows)[:, None] & inside[None, :], inside[:, None] & (component < rank)[None, :]
        left = tl.load(x + row[:, None] * width + column[None, :], mask=x_mask, other=0.0)
        right = tl.load(a + component[None, :] * width + column[:, None], mask=a_mask, other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")

    block = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    parts = partial + block * (PIECES * TILE * TILE)
    place = tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    tl.store(parts + piece * (TILE * TILE) + place, sums, mask=(row < rows)[:, None], cache_modifier=".cg")
    tl.debug_barrier()  # all threads have stored before one of them says so
    if tl.atomic_add(counters + block, 1, sem="acq_rel", scope="gpu") == PIECES - 1:
        tl.atomic_xchg(counters + block, 0, sem="relaxed", scope="gpu")
        flat = tl.arange(0, TILE * TILE)
        m, r = tl.program_id(0) * TILE + flat // TILE, tl.program_id(1) * TILE + flat % TILE
        total = tl.zeros((TILE * TILE,), tl.float32)
        for i in tl.static_range(PIECES):
            total += tl.load(parts + i * (TILE * TILE) + flat, mask=m < rows, other=0.0, cache_modifier=".cg")
        tl.store(y + m * rank + r, total.to(y.dtype.element_ty), mask=(m < rows) & (r < rank))
