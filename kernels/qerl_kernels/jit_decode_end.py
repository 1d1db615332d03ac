"""From sums to y: the end of the two decode GEMMs, with partial sums, scales of rows, adapter and bias.

Sums of both are in the same order, row g or g + 8 of a warp's tile and two tokens of each eight, so partial sums, their
addition and the end are the same code. Left out: an interpreter, which Gluon lacks.
"""

# Triton's compiler wants constexpr annotations, although calls pass plain numbers.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from qerl_kernels.jit_decode_common import barrier, grid_dependency, powers, sums_layout


@gluon.constexpr_function
def private_layout(tiles, tokens, warps):
    """Accumulators (tiles, lane, tokens / 8, 4): a thread holds 16 bytes for each 8 tokens."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], *powers(4, 2, 1, tokens // 8), *powers(4, 0, warps, tiles)],
        lane_bases=powers(4, 1, 1, 32),
        warp_bases=powers(4, 0, 1, warps),
        block_bases=[],
        shape=[tiles, 32, tokens // 8, 4],
    )


@gluon.jit
def _to_private(acc, BM: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr):
    x = gl.reshape(acc, [BM // 16, 2, 8, BN // 8, 4, 2])  # tile, row half, g, 8 tokens, t, parity
    x = gl.reshape(gl.permute(x, (0, 2, 4, 3, 1, 5)), [BM // 16, 32, BN // 8, 4])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _from_private(x, BM: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr):
    x = gl.reshape(x, [BM // 16, 8, 4, BN // 8, 2, 2])
    x = gl.reshape(gl.permute(x, (0, 4, 1, 3, 2, 5)), [BM, BN])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def private_offsets(BM: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr, OF: gl.constexpr):
    """Offsets of the accumulators of the first BN tokens in partial sums (BM, OF): 512 contiguous bytes per warp."""
    tile = gl.arange(0, BM // 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    eight = gl.arange(0, BN // 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    i = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    at = gl.expand_dims(tile * (16 * OF), 1) + gl.expand_dims(lane * 4, 0)
    at = gl.expand_dims(at, 2) + gl.expand_dims(gl.expand_dims(eight * 128, 0), 1)
    return gl.expand_dims(at, 3) + gl.expand_dims(gl.expand_dims(gl.expand_dims(i, 0), 1), 2)


@gluon.jit
def _add_low_rank(
    acc, xa_ptr, b_ptr, n0, m0, M, N, rank, first, own,
    BM: gl.constexpr, BN: gl.constexpr, RANK: gl.constexpr, LAYOUT: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """`acc` (BM, BN) + B XA^T for rows n0.. of B and m0.. of XA, of `own` columns from `first` on."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2)
    if LAYOUT.version[0] == 3:
        b = _columns(b_ptr, n0, N, rank, first, own, BM, RANK, OPERAND)
        XA: gl.constexpr = gl.BlockedLayout([1, 8], [32 // min(RANK // 8, 32), min(RANK // 8, 32)], [W, 1], [1, 0])
        xa = _columns(xa_ptr, m0, M, rank, first, own, BN, RANK, XA)
        SHARED: gl.constexpr = gl.NVMMASharedLayout(min(RANK * 2, 128), 16, 2)
        shared = gl.allocate_shared_memory(gl.bfloat16, [BN, RANK], SHARED, xa)
        fence_async_shared()
        barrier()
        return warpgroup_mma(b, shared.permute((1, 0)), acc)
    else:
        TOKENS: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=LAYOUT, k_width=2)
        m = m0 + gl.arange(0, BN, layout=gl.SliceLayout(0, TOKENS))
        k = gl.arange(0, 16, layout=gl.SliceLayout(1, TOKENS))
        for i in gl.static_range(0, RANK, 16):
            b = _columns(b_ptr, n0, N, rank, first + i, own - i, BM, 16, OPERAND)
            keep = gl.expand_dims(m < M, 0) & gl.expand_dims(k < own - i, 1)
            at = xa_ptr + gl.expand_dims(m * rank + first + i, 0) + gl.expand_dims(k, 1)
            acc = mma_v2(b, gl.load(at, mask=keep, other=0.0), acc)
        return acc


@gluon.jit
def _columns(
    ptr, row, end, width, first, columns, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """ROWS rows of a matrix (end, width) from `row` on, `columns` of them from `first` on, with zeros around."""
    n = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    k = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    keep = gl.expand_dims(n < end, 1) & gl.expand_dims(k < columns, 0)
    return gl.load(ptr + gl.expand_dims(n * width + first, 1) + gl.expand_dims(k, 0), mask=keep, other=0.0)


@gluon.jit
def _write(
    acc,
    row_scale_ptr,
    bias_ptr,
    xa_ptr,
    b_ptr,
    y_ptr,
    n0,
    m0,
    factor,
    scaling,
    M,
    N,
    rank,
    own,
    end1,
    end2,
    stride_ym,
    BM: gl.constexpr,
    BN: gl.constexpr,
    RANK: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    LAYOUT: gl.constexpr,
    W: gl.constexpr,
):
    """y[m0:, n0:] = acc^T * factor * row scale + (XA B^T) * scaling + bias, rounded once.

    Of XA and B it reads the columns of its part of the rows. XA B^T is added to acc itself, which is divided by
    `scaling` before and multiplied by it after: second accumulators would leave room for fewer programs.
    """
    n = n0 + gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT))
    if RANK > 0:
        factor /= scaling
    acc = acc * factor
    if HAS_ROW_SCALE:
        acc = acc * gl.expand_dims(gl.load(row_scale_ptr + n, mask=n < N, other=0.0).to(gl.float32), 1)
    if RANK > 0:
        first = own * ((n0 >= end1).to(gl.int32) + (n0 >= end2).to(gl.int32))
        acc = _add_low_rank(acc, xa_ptr, b_ptr, n0, m0, M, N, rank, first, own, BM, BN, RANK, LAYOUT, W)
        acc = acc * scaling
    if HAS_BIAS:
        acc += gl.expand_dims(gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32), 1)
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, W], [0, 1])
    y = gl.convert_layout(acc.to(gl.bfloat16), OUT)
    n = n0 + gl.arange(0, BM, layout=gl.SliceLayout(1, OUT))
    m = m0 + gl.arange(0, BN, layout=gl.SliceLayout(0, OUT))
    at = y_ptr + gl.expand_dims(n, 1) + gl.expand_dims(m * stride_ym, 0)
    gl.store(at, y, mask=gl.expand_dims(n < N, 1) & gl.expand_dims(m < M, 0))


@gluon.jit
def finish(
    acc, row_scale_ptr, bias_ptr, xa_ptr, b_ptr, y_ptr, partial_ptr, counter_ptr, block, split, n0, m0, factor,
    scaling, M, N, rank, own, end1, end2, stride_ym,
    BM: gl.constexpr, BN: gl.constexpr, SPLIT: gl.constexpr, SEPARATE: gl.constexpr, RANK: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr, LAYOUT: gl.constexpr, PRIVATE: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Write y; if programs split K, partial sums, of which the last program to finish makes y unless SEPARATE."""
    if SPLIT == 1:
        _write(
            acc, row_scale_ptr, bias_ptr, xa_ptr, b_ptr, y_ptr, n0, m0, factor, scaling, M, N, rank, own, end1,
            end2, stride_ym, BM, BN, RANK, HAS_ROW_SCALE, HAS_BIAS, LAYOUT, W,
        )  # fmt: skip
    else:
        part = partial_ptr + block * (SPLIT * BM * BN) + private_offsets(BM, BN, PRIVATE, BN)
        gl.store(part + split * (BM * BN), _to_private(acc, BM, BN, PRIVATE), cache_modifier=".cg")
        if not SEPARATE:
            barrier()
            arrived = gl.atomic_add(counter_ptr + block, 1, sem="acq_rel", scope="gpu")
            if arrived == SPLIT - 1:
                total = gl.load(part, cache_modifier=".cg")
                for i in gl.static_range(1, SPLIT):
                    total += gl.load(part + i * (BM * BN), cache_modifier=".cg")
                gl.atomic_xchg(counter_ptr + block, 0, sem="relaxed", scope="gpu")
                _write(
                    _from_private(total, BM, BN, LAYOUT), row_scale_ptr, bias_ptr, xa_ptr, b_ptr, y_ptr, n0, m0,
                    factor, scaling, M, N, rank, own, end1, end2, stride_ym, BM, BN, RANK, HAS_ROW_SCALE,
                    HAS_BIAS, LAYOUT, W,
                )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "end1", "end2"])
def add_partials(
    row_scale_ptr,
    bias_ptr,
    xa_ptr,
    b_ptr,
    y_ptr,
    partial_ptr,
    factor,
    scaling,
    M,
    N,
    rank,
    own,
    end1,
    end2,
    stride_ym,
    BM: gl.constexpr,  # of the partial sums
    BN: gl.constexpr,
    PART: gl.constexpr,  # tokens per program
    SPLIT: gl.constexpr,
    RANK: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
    WGMMA: gl.constexpr,  # which instruction adds the adapter: that of the kernel before
):
    """Add the partial sums of 64 rows and PART tokens in the order of K."""
    ACC: gl.constexpr = sums_layout(PART, 4, WGMMA)
    PRIVATE: gl.constexpr = private_layout(4, PART, 4)
    block = gl.program_id(0)
    token_blocks = (M + BN - 1) // BN
    n0 = (block // token_blocks) * BM + gl.program_id(1) * 64
    m0 = (block % token_blocks) * BN + gl.program_id(2) * PART
    part = partial_ptr + block * (SPLIT * BM * BN) + gl.program_id(1) * (64 * BN) + gl.program_id(2) * (PART * 16)
    part += private_offsets(64, PART, PRIVATE, BN)
    if PDL:
        grid_dependency("launch_dependents")
        grid_dependency("wait")
    total = gl.load(part, cache_modifier=".cg")
    for i in gl.static_range(1, SPLIT):
        total += gl.load(part + i * (BM * BN), cache_modifier=".cg")
    acc = _from_private(total, 64, PART, ACC)
    _write(
        acc, row_scale_ptr, bias_ptr, xa_ptr, b_ptr, y_ptr, n0, m0, factor, scaling, M, N, rank, own, end1,
        end2, stride_ym, 64, PART, RANK, HAS_ROW_SCALE, HAS_BIAS, ACC, 4,
    )  # fmt: skip
