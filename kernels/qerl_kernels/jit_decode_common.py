"""What the two decode GEMMs share: from packed words in memory to the operand of a tensor core, and from sums to y.

`jit_decode` (wgmma) and `jit_decode_mma` (mma.sync) multiply in loops of their own. Words of W are in the order of both
instructions' A operand (`layout`), so a lane loads what it multiplies and turns it into bfloat16 with masks and a
product with the scale, which a whole row may have in common: then the sums are multiplied by it. The sums of both are
in the same order too, row g or g + 8 of a warp's tile and two tokens of each eight, so partial sums, their addition and
the end are the same code. Left out: an interpreter, which Gluon lacks.
"""

# Triton's compiler wants constexpr annotations, although calls pass plain numbers.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from qerl_kernels import decode_assembly
from qerl_kernels.layout import BLOCK, EIGHT_BITS, INPUTS, SQUARES

# Names before and after Triton 3.7.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


NVFP4, NVFP4_FUSED = (gl.constexpr(decode_assembly.nvfp4(fused)) for fused in (False, True))
MXFP4, MXFP4_FUSED = (gl.constexpr(decode_assembly.mxfp4(fused)) for fused in (False, True))
NF4 = gl.constexpr(decode_assembly.nf4())
FP8, FP8_128X128 = (gl.constexpr(decode_assembly.fp8(squares)) for squares in (False, True))
INT8 = gl.constexpr(decode_assembly.int8())
INT4_32, INT4_128 = (gl.constexpr(decode_assembly.int4(blocks)) for blocks in (2, 1))
TWO_INPUTS = gl.constexpr(decode_assembly.constraints(2))
THREE_INPUTS = gl.constexpr(decode_assembly.constraints(3))
FOUR_INPUTS = gl.constexpr(decode_assembly.constraints(4))
PAIRS = gl.constexpr((gl.bfloat16,) * 8)


@gluon.constexpr_function
def words_step(format_name):
    """Words from one column of tiles to the next."""
    return 256 if format_name in EIGHT_BITS else 128


@gluon.constexpr_function
def columns_of(format_name):
    """Columns of tiles that share scale words; 0: all do."""
    return -(-BLOCK[format_name] // INPUTS)


@gluon.constexpr_function
def scales_step(format_name, columns):
    """Scale words from a column of tiles to that `columns` further on; 0 if they share them."""
    shared = -(-BLOCK[format_name] // INPUTS)
    return columns // shared * (1 if format_name == SQUARES else 16) if shared else 0


@gluon.constexpr_function
def parts(format_name):
    """Tensors of a column of tiles: one or two of words, then none, one (squares) or two of scales."""
    scales = 0 if BLOCK[format_name] == 0 else 1 if format_name == SQUARES else 2
    return scales + (2 if format_name in EIGHT_BITS else 1)


@gluon.constexpr_function
def _powers(rank, axis, first, end):
    """The bases first, 2 first, 4 first, .. below `end` along one axis."""
    bases, step = [], first
    while step < end:
        bases.append([step if i == axis else 0 for i in range(rank)])
        step *= 2
    return bases


@gluon.constexpr_function
def words_layout(tiles, warps):
    """(tiles, g, t, word): a warp's tile, a lane's 16 bytes."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], *_powers(4, 0, warps, tiles)],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        warp_bases=_powers(4, 0, 1, warps),
        block_bases=[],
        shape=[tiles, 8, 4, 4],
    )


@gluon.constexpr_function
def scales_layout(tiles, warps):
    """(tiles, g, row half): the four lanes of each g read the same."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], *_powers(3, 0, warps, tiles)],
        lane_bases=[[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=_powers(3, 0, 1, warps),
        block_bases=[],
        shape=[tiles, 8, 2],
    )


@gluon.constexpr_function
def sums_layout(tokens, warps, wgmma):
    """Sums (rows, tokens) of one instruction or the other; a warp has 16 rows at a time."""
    if wgmma:
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, tokens, 16])
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def private_layout(tiles, tokens, warps):
    """Accumulators (tiles, lane, tokens / 8, 4): a thread holds 16 bytes for each 8 tokens."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], *_powers(4, 2, 1, tokens // 8), *_powers(4, 0, warps, tiles)],
        lane_bases=_powers(4, 1, 1, 32),
        warp_bases=_powers(4, 0, 1, warps),
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
def _of_lanes(z, TILES: gl.constexpr):
    return gl.expand_dims(gl.expand_dims(z, 2), 3).broadcast_to([TILES, 8, 4, 4])


@gluon.jit
def fragment(loaded, column: gl.constexpr, table, FORMAT: gl.constexpr, TILES: gl.constexpr, LAYOUT: gl.constexpr):
    """The A operand (16 TILES, 64) of a column that `load_column` has added to `loaded`."""
    FIRST: gl.constexpr = column * parts(FORMAT)
    words, second = loaded[FIRST], loaded[FIRST + 1]
    if FORMAT == "fp8-128x128":
        s0 = _of_lanes(loaded[FIRST + 2], TILES)
    elif FORMAT != "fp8" and FORMAT != "int8":
        s0 = _of_lanes(second, TILES)
        s1 = _of_lanes(loaded[FIRST + 2], TILES)
    FUSED: gl.constexpr = LAYOUT.parent.version[0] == 2
    if FORMAT == "fp8" or FORMAT == "int8":
        CODE: gl.constexpr = FP8 if FORMAT == "fp8" else INT8
        o = gl.inline_asm_elementwise(CODE, TWO_INPUTS, [words, second], dtype=PAIRS, is_pure=True, pack=4)
    elif FORMAT == "fp8-128x128":
        o = gl.inline_asm_elementwise(FP8_128X128, THREE_INPUTS, [words, second, s0], dtype=PAIRS, is_pure=True, pack=4)
    elif FORMAT == "int4-32" or FORMAT == "int4-128":
        CODE: gl.constexpr = INT4_32 if FORMAT == "int4-32" else INT4_128
        o = gl.inline_asm_elementwise(CODE, THREE_INPUTS, [words, s0, s1], dtype=PAIRS, is_pure=True, pack=4)
    elif FORMAT == "nf4":
        o = gl.inline_asm_elementwise(NF4, FOUR_INPUTS, [words, s0, s1, table], dtype=PAIRS, is_pure=True, pack=4)
    elif FORMAT == "mxfp4":
        CODE: gl.constexpr = MXFP4_FUSED if FUSED else MXFP4
        o = gl.inline_asm_elementwise(CODE, THREE_INPUTS, [words, s0, s1], dtype=PAIRS, is_pure=True, pack=4)
    else:
        CODE: gl.constexpr = NVFP4_FUSED if FUSED else NVFP4
        o = gl.inline_asm_elementwise(CODE, THREE_INPUTS, [words, s0, s1], dtype=PAIRS, is_pure=True, pack=4)
    # Element (tile, g, t, 2 jhi + parity) of tensor 4 jlo + 2 (input half) + (row half); the rest only reorders names.
    x0 = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3]))
    x1 = gl.join(gl.join(o[4], o[5]), gl.join(o[6], o[7]))
    x = gl.reshape(gl.join(x0, x1), [TILES, 8, 4, 2, 2, 2, 2, 2])  # tile g t jhi parity (row half) (input half) jlo
    x = gl.reshape(gl.permute(x, (0, 5, 1, 3, 7, 6, 2, 4)), [16 * TILES, 64])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def word_pointers(
    ptr, first_tile, row_block, TILES, COLUMNS, first,
    FORMAT: gl.constexpr, RING: gl.constexpr, T: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Of the words (T, 8, 4, 4) of T tiles in column RING * `first`. Tiles past the last are read as the last.

    Addresses have 32 bits, enough for 2^33 weights.
    """
    tile = gl.arange(0, T, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    tile = (first_tile + gl.minimum(row_block * T + tile, TILES - 1)) * COLUMNS + first * RING
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    at = gl.expand_dims(tile * words_step(FORMAT), 1) + gl.expand_dims(g * 16, 0)
    at = gl.expand_dims(at, 2) + gl.expand_dims(gl.expand_dims(t * 4, 0), 1)
    return ptr + gl.expand_dims(at, 3) + gl.expand_dims(gl.expand_dims(gl.expand_dims(j, 0), 1), 2)


@gluon.jit
def scale_pointers(
    ptr, first_tile, row_block, TILES, COLUMNS, first,
    FORMAT: gl.constexpr, RING: gl.constexpr, T: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Of the scale words (T, 8, 2) of the same tiles; of squares (T, 8), 8 times the same; of rows none."""
    SHARED: gl.constexpr = columns_of(FORMAT)
    if SHARED == 0:
        return ptr
    else:
        gl.static_assert(RING % SHARED == 0)
        tile = gl.arange(0, T, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
        tile = first_tile + gl.minimum(row_block * T + tile, TILES - 1)
        tile = tile * (COLUMNS // SHARED) + first * (RING // SHARED)
        g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
        if FORMAT == "fp8-128x128":
            return ptr + gl.expand_dims(tile, 1) + gl.expand_dims(g * 0, 0)
        else:
            half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
            at = gl.expand_dims(tile * 16, 1) + gl.expand_dims(g * 2, 0)
            return ptr + gl.expand_dims(at, 2) + gl.expand_dims(gl.expand_dims(half, 0), 1)


@gluon.jit
def values_of_codes(ptr, FORMAT: gl.constexpr, T: gl.constexpr, LAYOUT: gl.constexpr):
    """For NF4 the value of code i in lane i of each half warp; 0 for others."""
    if FORMAT == "nf4":
        g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
        t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
        lane = gl.expand_dims(gl.expand_dims(g * 4, 0), 2) + gl.expand_dims(gl.expand_dims(t, 0), 1)
        return gl.expand_dims(gl.load(ptr + lane % 16), 3).broadcast_to([T, 8, 4, 4])
    else:
        return 0


@gluon.jit
def load_column(w_ptr, s_ptr, on, FORMAT: gl.constexpr, TILES: gl.constexpr, LAYOUT: gl.constexpr):
    """Words of one column of tiles and the scale words (TILES, 8) of rows g and g + 8; 0 unless `on`. See `parts`."""
    keep = gl.full([TILES, 8, 4, 4], on, gl.int1, layout=LAYOUT)
    loaded = (gl.load(w_ptr, mask=keep, other=0, eviction_policy="evict_first"),)
    if words_step(FORMAT) == 256:
        loaded += (gl.load(w_ptr + 128, mask=keep, other=0, eviction_policy="evict_first"),)
    ROWS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))
    if FORMAT == "fp8-128x128":
        z = gl.load(s_ptr, mask=gl.full([TILES, 8], on, gl.int1, layout=s_ptr.type.layout), other=0)
        loaded += (gl.convert_layout(z.to(gl.int32), ROWS, assert_trivial=True),)
    elif columns_of(FORMAT) > 0:
        z = gl.load(s_ptr, mask=gl.full([TILES, 8, 2], on, gl.int1, layout=s_ptr.type.layout), other=0)
        z = z.to(gl.int32, bitcast=True) if FORMAT == "nf4" else z.to(gl.int32)
        z0, z1 = gl.split(z)
        z0 = gl.convert_layout(z0, ROWS, assert_trivial=True)
        loaded += (z0, gl.convert_layout(z1, ROWS, assert_trivial=True))
    return loaded


@gluon.jit
def grid_dependency(WHAT: gl.constexpr):
    """Programmatic dependent launch: `wait` for earlier kernels, or let the next one start (`launch_dependents`)."""
    gl.inline_asm_elementwise("griddepcontrol." + WHAT + "; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


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
