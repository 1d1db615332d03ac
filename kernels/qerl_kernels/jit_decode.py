"""The decode GEMM for Hopper in Gluon: y^T = W x^T with packed W decoded in registers, activations in shared memory.

Each program multiplies BM rows of W by BN tokens over its part of K. A warp takes 16 rows. Each lane loads the words
and scales that it feeds to the tensor core (`layout`) straight from device memory, RING columns of 64 inputs ahead, and
turns them into the A operand of a wgmma (`jit_decode_common`). The copy engine fills XBUF buffers of activations. SPLIT
programs that share rows write FP32 sums to a workspace; the last to finish, or a second kernel, adds them in the order
of K, so results do not depend on timing. If GROUPED, W stacks the matrices of several experts, and each entry of
`items` is up to BN rows of x with the expert that multiplies them (`grouped`). If BESIDE, the kernel before computes
XA = x A^T of an adapter, and lets this one start when x is complete: it waits for XA at its end. Gluon has no
interpreter: without a GPU, tests cover the layout's reference and the compiled code.
"""

# Triton's compiler wants constexpr annotations, although calls pass plain numbers.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qerl_kernels.jit_decode_common import (
    barrier,
    fence_async_global,
    fragment,
    grid_dependency,
    load_column,
    scale_pointers,
    scales_layout,
    scales_step,
    sums_layout,
    values_of_codes,
    word_pointers,
    words_layout,
    words_step,
)
from qerl_kernels.jit_decode_end import finish, private_layout

# Names before and after Triton 3.7.
_load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _load_activations(x_box, xs, bars, m0, r, buf, on, BN: gl.constexpr, RING: gl.constexpr):
    mbarrier.expect(bars.index(buf), RING * BN * 128, pred=on)
    _load_box(x_box, [m0, r * RING * 64], bars.index(buf), xs.index(buf), pred=on)


@gluon.jit(do_not_specialize=["M", "COLUMNS", "TILES", "end1", "end2", "items"])
def decode(
    x_box,
    words_ptr,
    scales_ptr,
    table_ptr,
    row_scale_ptr,
    bias_ptr,
    xa_ptr,
    b_ptr,
    y_ptr,
    partial_ptr,
    counter_ptr,
    items_ptr,
    factor,
    scaling,
    M,
    N,
    COLUMNS,
    TILES,
    rank,  # columns of XA and B
    own,  # those that a row of B has, in each of up to three parts, which end at rows end1 and end2
    end1,
    end2,
    stride_ym,
    items,
    FORMAT: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    SPLIT: gl.constexpr,
    RING: gl.constexpr,
    XBUF: gl.constexpr,
    OVERLAP: gl.constexpr,  # the tensor core may run into the next round
    SEPARATE: gl.constexpr,  # `add_partials` follows
    RANK: gl.constexpr,  # `own`, rounded up to a power of two of at least 16; 0: no adapter
    HAS_ROW_SCALE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    EVEN: gl.constexpr,  # COLUMNS is a multiple of RING
    PDL: gl.constexpr,  # programmatic dependent launch: starts while the previous kernel still runs
    BESIDE: gl.constexpr,  # x is complete at the start, XA is not
    GROUPED: gl.constexpr,  # N and TILES are of one expert, and so is row_scale, which then is a number; RANK is 0
    W: gl.constexpr,
):
    T: gl.constexpr = BM // 16
    STEP: gl.constexpr = words_step(FORMAT)
    ACC: gl.constexpr = sums_layout(BN, W, True)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    WORDS: gl.constexpr = words_layout(T, W)
    SCALES: gl.constexpr = scales_layout(T, W)
    PRIVATE: gl.constexpr = private_layout(T, BN, W)

    block = gl.program_id(0)
    split = gl.program_id(1)
    first_tile = 0
    if GROUPED:
        if PDL:
            grid_dependency("launch_dependents")
            grid_dependency("wait")
        row_block = block // items
        items_ptr += block % items * 3
        expert = gl.load(items_ptr)
        if expert < 0:
            return
        m0 = gl.load(items_ptr + 1)
        M = gl.load(items_ptr + 2)
        first_tile = expert * TILES
        if HAS_ROW_SCALE:
            factor *= gl.load(row_scale_ptr + expert)
        if HAS_BIAS:
            bias_ptr += expert * N
    else:
        token_blocks = (M + BN - 1) // BN
        row_block = block // token_blocks
        m0 = (block % token_blocks) * BN
    rounds = (COLUMNS + RING - 1) // RING
    first = rounds * split // SPLIT
    last = rounds * (split + 1) // SPLIT

    w_ptr = word_pointers(words_ptr, first_tile, row_block, TILES, COLUMNS, first, FORMAT, RING, T, WORDS)
    s_ptr = scale_pointers(scales_ptr, first_tile, row_block, TILES, COLUMNS, first, FORMAT, RING, T, SCALES)
    table = values_of_codes(table_ptr, FORMAT, T, WORDS)

    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    xs = gl.allocate_shared_memory(gl.bfloat16, [XBUF, BN, RING * 64], SHARED)
    bars = gl.allocate_shared_memory(gl.int64, [XBUF, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(XBUF):
        mbarrier.init(bars.index(b), count=1)
    fence_async_shared()
    barrier()

    loaded = ()
    for i in gl.static_range(RING):
        on = first * RING + i < COLUMNS
        loaded += load_column(w_ptr + i * STEP, s_ptr + scales_step(FORMAT, i), on, FORMAT, T, WORDS)
    if PDL and not GROUPED:  # nothing above depends on earlier kernels
        grid_dependency("launch_dependents")
        if BESIDE:
            fence_async_global()  # the copy engine reads x without a wait
        else:
            grid_dependency("wait")
    for b in gl.static_range(XBUF):
        _load_activations(x_box, xs, bars, m0, first + b, b, first + b < last, BN, RING)

    acc = gl.zeros([BM, BN], gl.float32, layout=ACC)
    buf = 0
    free = 0
    phase = 0
    for r in range(first, last):
        mbarrier.wait(bars.index(buf), phase)
        w_ptr += RING * STEP
        s_ptr += scales_step(FORMAT, RING)
        following = ()
        for i in gl.static_range(RING):
            a = fragment(loaded, i, table, FORMAT, T, OPERAND)
            on = (r + 1 < last) & (EVEN | ((r + 1) * RING + i < COLUMNS))
            following += load_column(w_ptr + i * STEP, s_ptr + scales_step(FORMAT, i), on, FORMAT, T, WORDS)
            acc = warpgroup_mma(a, xs.index(buf).slice(i * 64, 64, dim=1).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            if OVERLAP and i == 0:  # all warps have finished the previous round: its buffer is free
                barrier()
                on = (r > first) & (r - 1 + XBUF < last)
                _load_activations(x_box, xs, bars, m0, r - 1 + XBUF, free, on, BN, RING)
        loaded = following
        if not OVERLAP:
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()
            _load_activations(x_box, xs, bars, m0, r + XBUF, buf, r + XBUF < last, BN, RING)
        free = buf
        buf += 1
        if buf == XBUF:
            buf = 0
            phase ^= 1
    if OVERLAP:
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
    if PDL and BESIDE:  # nothing above writes, or reads what the kernel before writes
        grid_dependency("wait")

    finish(
        acc, row_scale_ptr, bias_ptr, xa_ptr, b_ptr, y_ptr, partial_ptr, counter_ptr, block, split, row_block * BM, m0,
        factor, scaling, M, N, rank, own, end1, end2, stride_ym, BM, BN, SPLIT, SEPARATE, RANK,
        HAS_ROW_SCALE and not GROUPED, HAS_BIAS, ACC, PRIVATE, W,
    )  # fmt: skip
