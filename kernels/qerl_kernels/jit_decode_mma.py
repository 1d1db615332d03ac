"""The decode GEMM for GPUs other than Hopper, in Gluon: `jit_decode` with mma.sync, which every card from sm_80 on has.

Programs, warps, words, scales, partial sums and the end are those of `jit_decode`. What differs is where activations
come from: threads copy them to shared memory asynchronously, XBUF - 1 rounds of RING columns ahead, and a warp reads
them from there with ldmatrix, BN tokens by 64 inputs at a time. Left out: experts, for which such cards run
`jit_grouped`.
"""

# Triton's compiler wants constexpr annotations, although calls pass plain numbers.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from qerl_kernels.jit_decode_common import (
    barrier,
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
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.jit(do_not_specialize=["M", "K", "COLUMNS", "TILES", "end1", "end2", "stride_x"])
def decode(
    x_ptr,
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
    factor,
    scaling,
    M,
    N,
    K,  # in 8 numbers, as is stride_x: copies of 16 bytes need to know that no mask cuts one
    COLUMNS,
    TILES,
    rank,  # these four as in `jit_decode`
    own,
    end1,
    end2,
    stride_x,
    stride_ym,
    FORMAT: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    SPLIT: gl.constexpr,
    RING: gl.constexpr,
    XBUF: gl.constexpr,
    SEPARATE: gl.constexpr,
    RANK: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
    W: gl.constexpr,
):
    T: gl.constexpr = BM // 16
    STEP: gl.constexpr = words_step(FORMAT)
    ACC: gl.constexpr = sums_layout(BN, W, False)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    TOKENS: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=ACC, k_width=2)
    WORDS: gl.constexpr = words_layout(T, W)
    SCALES: gl.constexpr = scales_layout(T, W)
    PRIVATE: gl.constexpr = private_layout(T, BN, W)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])

    block = gl.program_id(0)
    split = gl.program_id(1)
    token_blocks = (M + BN - 1) // BN
    row_block = block // token_blocks
    m0 = (block % token_blocks) * BN
    rounds = (COLUMNS + RING - 1) // RING
    first = rounds * split // SPLIT
    last = rounds * (split + 1) // SPLIT

    w_ptr = word_pointers(words_ptr, 0, row_block, TILES, COLUMNS, first, FORMAT, RING, T, WORDS)
    s_ptr = scale_pointers(scales_ptr, 0, row_block, TILES, COLUMNS, first, FORMAT, RING, T, SCALES)
    table = values_of_codes(table_ptr, FORMAT, T, WORDS)
    loaded = ()
    for i in gl.static_range(RING):
        on = first * RING + i < COLUMNS
        loaded += load_column(w_ptr + i * STEP, s_ptr + scales_step(FORMAT, i), on, FORMAT, T, WORDS)
    if PDL:  # nothing above depends on earlier kernels
        grid_dependency("launch_dependents")
        grid_dependency("wait")

    # A round's activations are RING blocks of BN rows, one below the other, and come with one copy. Around x are zeros.
    row = gl.arange(0, RING * BN, layout=gl.SliceLayout(1, COPY))
    k = gl.expand_dims(row // BN * 64, 1) + gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, COPY)), 0)
    row = gl.expand_dims(m0 + row % BN, 1)
    x_ptr += row * (stride_x * 8) + k
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0])
    xs = gl.allocate_shared_memory(gl.bfloat16, [XBUF, RING * BN, 64], SHARED)
    for b in gl.static_range(XBUF - 1):
        at = (first + b) * (RING * 64)
        _copy(xs.index(b), x_ptr + at, mask=(row < M) & (k < K * 8 - at) & (first + b < last))
        async_copy.commit_group()

    acc = gl.zeros([BM, BN], gl.float32, layout=ACC)
    buf = 0
    free = XBUF - 1
    for r in range(first, last):
        async_copy.wait_group(XBUF - 2)
        barrier()  # this round is there for all warps, and all have finished the previous one: its buffer is free
        at = (r + XBUF - 1) * (RING * 64)
        _copy(xs.index(free), x_ptr + at, mask=(row < M) & (k < K * 8 - at) & (r + XBUF - 1 < last))
        async_copy.commit_group()
        w_ptr += RING * STEP
        s_ptr += scales_step(FORMAT, RING)
        following = ()
        for i in gl.static_range(RING):
            a = fragment(loaded, i, table, FORMAT, T, OPERAND)
            on = (r + 1 < last) & ((r + 1) * RING + i < COLUMNS)
            following += load_column(w_ptr + i * STEP, s_ptr + scales_step(FORMAT, i), on, FORMAT, T, WORDS)
            acc = mma_v2(a, xs.index(buf).slice(i * BN, BN, dim=0).permute((1, 0)).load(TOKENS), acc)
        loaded = following
        free = buf
        buf += 1
        if buf == XBUF:
            buf = 0
    async_copy.wait_group(0)

    finish(
        acc, row_scale_ptr, bias_ptr, xa_ptr, b_ptr, y_ptr, partial_ptr, counter_ptr, block, split, row_block * BM, m0,
        factor, scaling, M, N, rank, own, end1, end2, stride_ym, BM, BN, SPLIT, SEPARATE, RANK, HAS_ROW_SCALE, HAS_BIAS,
        ACC, PRIVATE, W,
    )  # fmt: skip
