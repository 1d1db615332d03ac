"""The decode GEMM for Hopper in Gluon: y^T = W x^T with 4-bit W decoded in registers, activations in shared memory.

Each program multiplies BM rows of W by BN tokens over its part of K. A warp takes 16 rows. Each lane loads the words
and scales that it feeds to the tensor core (`layout`) straight from device memory, RING columns of 64 inputs ahead, and
turns them into the A operand of a wgmma with masks and one product with the scale. The copy engine fills XBUF buffers
of activations. SPLIT programs that share rows write FP32 sums to a workspace; the last to finish, or a second kernel,
adds them in the order of K, so results do not depend on timing. If GROUPED, W stacks the matrices of several experts,
and each entry of `items` is up to BN rows of x with the expert that multiplies them (`grouped`). Gluon has no
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

# Names before and after Triton 3.7.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def _output(j: int, pair: int) -> str:
    """The assembly operand for a pair of word j = 2 jhi + jlo: register jhi of output tensor 4 jlo + pair."""
    return f"${2 * (4 * (j & 1) + pair) + (j >> 1)}"


def _fp4_assembly(scale_lines: list[str], scales: list[list[str]]) -> str:
    """PTX from 4 words (operands 16 to 19) to 16 registers; `scales` are bf16x2, by row half and word."""
    lines = ["{", ".reg .b32 x, y, m, c, q<8>;", "mov.b32 m, 0x81C081C0;", *scale_lines]
    for j in range(4):
        word, out = f"${16 + j}", [_output(j, pair) for pair in range(4)]
        lines += [
            f"and.b32 x, {word}, m;",
            f"mul.rn.bf16x2 {out[0]}, x, {scales[0][j]};",
            f"shl.b32 x, {word}, 3;",
            "and.b32 x, x, m;",
            f"mul.rn.bf16x2 {out[1]}, x, {scales[1][j]};",
            f"shl.b32 x, {word}, 6;",
            "and.b32 x, x, m;",
            f"mul.rn.bf16x2 {out[2]}, x, {scales[0][j]};",
            f"shr.u32 x, {word}, 3;",
            f"shr.u32 y, {word}, 7;",
            "lop3.b32 x, x, y, 0x01C001C0, 0x28;",  # (x ^ y) & mask
            f"shl.b32 y, {word}, 1;",
            "lop3.b32 x, y, 0x80008000, x, 0xEA;",  # (y & mask) | x
            f"mul.rn.bf16x2 {out[3]}, x, {scales[1][j]};",
        ]
    return "\n".join([*lines, "}"])


def _nvfp4_assembly() -> str:
    """A scale word (operands 20 and 24, rows g and g + 8) holds the E4M3 bytes of 4 blocks."""
    lines = ["mov.b32 c, 0x7B007B00;"]  # 2^119 twice: s 2^-120 becomes s 2^118
    for half, word in enumerate(("$20", "$24")):
        lines += [
            f"shl.b32 x, {word}, 4;",
            "and.b32 x, x, 0x07F007F0;",  # bytes 0 and 2
            f"shr.u32 y, {word}, 4;",
            "and.b32 y, y, 0x07F007F0;",  # bytes 1 and 3
            *(f"mul.rn.bf16x2 {r}, {r}, c;" for r in ("x", "y", "x", "y")),
            *(f"prmt.b32 q{4 * half + j}, {'xy'[j & 1]}, 0, {'0x3232' if j & 2 else '0x1010'};" for j in range(4)),
        ]
    return _fp4_assembly(lines, [[f"q{4 * half + j}" for j in range(4)] for half in range(2)])


def _mxfp4_assembly() -> str:
    """A scale word holds the E8M0 bytes of 2 blocks, each for two words."""
    lines = []
    for half, word in enumerate(("$20", "$24")):
        for byte in range(2):
            q = f"q{2 * half + byte}"
            lines += [f"prmt.b32 {q}, {word}, 0, {'0x4141' if byte else '0x4040'};", f"shl.b32 {q}, {q}, 7;"]
    return _fp4_assembly(lines, [[f"q{2 * half + (j >> 1)}" for j in range(4)] for half in range(2)])


def _nf4_assembly() -> str:
    """Lane i of the half warp holds the value of code i (operand 28); the FP32 product with the scale is rounded."""
    lines = ["{", ".reg .b32 x, y;", ".reg .f32 v, w, s0, s1;", "mov.b32 s0, $20;", "mov.b32 s1, $24;"]
    for j in range(4):
        for pair in range(4):
            lines += [
                f"shr.u32 x, ${16 + j}, {4 * pair};",
                f"shr.u32 y, ${16 + j}, {4 * pair + 16};",
                "shfl.sync.idx.b32 x, $28, x, 0x101F, 0xFFFFFFFF;",
                "shfl.sync.idx.b32 y, $28, y, 0x101F, 0xFFFFFFFF;",
                "mov.b32 v, x;",
                "mov.b32 w, y;",
                f"mul.rn.f32 v, v, s{pair & 1};",
                f"mul.rn.f32 w, w, s{pair & 1};",
                f"cvt.rn.bf16x2.f32 {_output(j, pair)}, w, v;",
            ]
    return "\n".join([*lines, "}"])


def _constraints(inputs: int) -> str:
    return ",".join(["=&r"] * 16 + ["r"] * (4 * inputs))


NVFP4 = gl.constexpr(_nvfp4_assembly())
MXFP4 = gl.constexpr(_mxfp4_assembly())
NF4 = gl.constexpr(_nf4_assembly())
THREE_INPUTS = gl.constexpr(_constraints(3))
FOUR_INPUTS = gl.constexpr(_constraints(4))
PAIRS = gl.constexpr((gl.bfloat16,) * 8)


@gluon.constexpr_function
def _powers(rank, axis, first, end):
    """The bases first, 2 first, 4 first, .. below `end` along one axis."""
    bases, step = [], first
    while step < end:
        bases.append([step if i == axis else 0 for i in range(rank)])
        step *= 2
    return bases


@gluon.constexpr_function
def _words_layout(tiles, warps):
    """(tiles, g, t, word): a warp's tile, a lane's 16 bytes."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], *_powers(4, 0, warps, tiles)],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        warp_bases=_powers(4, 0, 1, warps),
        block_bases=[],
        shape=[tiles, 8, 4, 4],
    )


@gluon.constexpr_function
def _scales_layout(tiles, warps):
    """(tiles, g, row half): the four lanes of each g read the same."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], *_powers(3, 0, warps, tiles)],
        lane_bases=[[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=_powers(3, 0, 1, warps),
        block_bases=[],
        shape=[tiles, 8, 2],
    )


@gluon.constexpr_function
def _private_layout(tiles, tokens, warps):
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
def _private_offsets(BM: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr, OF: gl.constexpr):
    """Offsets of the accumulators of the first BN tokens in partial sums (BM, OF): 512 contiguous bytes per warp."""
    tile = gl.arange(0, BM // 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    eight = gl.arange(0, BN // 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    i = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    at = gl.expand_dims(tile * (16 * OF), 1) + gl.expand_dims(lane * 4, 0)
    at = gl.expand_dims(at, 2) + gl.expand_dims(gl.expand_dims(eight * 128, 0), 1)
    return gl.expand_dims(at, 3) + gl.expand_dims(gl.expand_dims(gl.expand_dims(i, 0), 1), 2)


@gluon.jit
def _fragment(words, z0, z1, table, FORMAT: gl.constexpr, TILES: gl.constexpr, LAYOUT: gl.constexpr):
    """Words (TILES, 8, 4, 4) and scale words (TILES, 8) of rows g and g + 8 to the A operand (16 TILES, 64)."""
    s0 = gl.expand_dims(gl.expand_dims(z0, 2), 3).broadcast_to([TILES, 8, 4, 4])
    s1 = gl.expand_dims(gl.expand_dims(z1, 2), 3).broadcast_to([TILES, 8, 4, 4])
    if FORMAT == "nf4":
        o = gl.inline_asm_elementwise(NF4, FOUR_INPUTS, [words, s0, s1, table], dtype=PAIRS, is_pure=True, pack=4)
    elif FORMAT == "mxfp4":
        o = gl.inline_asm_elementwise(MXFP4, THREE_INPUTS, [words, s0, s1], dtype=PAIRS, is_pure=True, pack=4)
    else:
        o = gl.inline_asm_elementwise(NVFP4, THREE_INPUTS, [words, s0, s1], dtype=PAIRS, is_pure=True, pack=4)
    # Element (tile, g, t, 2 jhi + parity) of tensor 4 jlo + 2 (input half) + (row half); the rest only reorders names.
    x0 = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3]))
    x1 = gl.join(gl.join(o[4], o[5]), gl.join(o[6], o[7]))
    x = gl.reshape(gl.join(x0, x1), [TILES, 8, 4, 2, 2, 2, 2, 2])  # tile g t jhi parity (row half) (input half) jlo
    x = gl.reshape(gl.permute(x, (0, 5, 1, 3, 7, 6, 2, 4)), [16 * TILES, 64])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _load_column(w_ptr, s_ptr, on, FORMAT: gl.constexpr, TILES: gl.constexpr, LAYOUT: gl.constexpr):
    """Words of one column of tiles and the scale words (TILES, 8) of rows g and g + 8; 0 unless `on`."""
    keep = gl.full([TILES, 8, 4, 4], on, gl.int1, layout=LAYOUT)
    w = gl.load(w_ptr, mask=keep, other=0, eviction_policy="evict_first")
    z = gl.load(s_ptr, mask=gl.full([TILES, 8, 2], on, gl.int1, layout=s_ptr.type.layout), other=0)
    z = z.to(gl.int32, bitcast=True) if FORMAT == "nf4" else z.to(gl.int32)
    z0, z1 = gl.split(z)
    ROWS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))
    return w, gl.convert_layout(z0, ROWS, assert_trivial=True), gl.convert_layout(z1, ROWS, assert_trivial=True)


@gluon.jit
def _load_activations(x_box, xs, bars, m0, r, buf, on, BN: gl.constexpr, RING: gl.constexpr):
    mbarrier.expect(bars.index(buf), RING * BN * 128, pred=on)
    _load_box(x_box, [m0, r * RING * 64], bars.index(buf), xs.index(buf), pred=on)


@gluon.jit
def _grid_dependency(WHAT: gl.constexpr):
    """Programmatic dependent launch: `wait` for earlier kernels, or let the next one start (`launch_dependents`)."""
    gl.inline_asm_elementwise("griddepcontrol." + WHAT + "; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _finish(
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

    Of XA and B it reads the columns of its part of the rows.
    """
    n = n0 + gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT))
    acc = acc * factor
    if HAS_ROW_SCALE:
        acc = acc * gl.expand_dims(gl.load(row_scale_ptr + n, mask=n < N, other=0.0), 1)
    if RANK > 0:
        first = own * ((n0 >= end1).to(gl.int32) + (n0 >= end2).to(gl.int32))
        OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2)
        bn = n0 + gl.arange(0, BM, layout=gl.SliceLayout(1, OPERAND))
        bk = gl.arange(0, RANK, layout=gl.SliceLayout(0, OPERAND))
        keep = gl.expand_dims(bn < N, 1) & gl.expand_dims(bk < own, 0)
        b = gl.load(b_ptr + gl.expand_dims(bn * rank + first, 1) + gl.expand_dims(bk, 0), mask=keep, other=0.0)
        XA: gl.constexpr = gl.BlockedLayout([1, 8], [32 // min(RANK // 8, 32), min(RANK // 8, 32)], [W, 1], [1, 0])
        am = m0 + gl.arange(0, BN, layout=gl.SliceLayout(1, XA))
        ak = gl.arange(0, RANK, layout=gl.SliceLayout(0, XA))
        keep = gl.expand_dims(am < M, 1) & gl.expand_dims(ak < own, 0)
        xa = gl.load(xa_ptr + gl.expand_dims(am * rank + first, 1) + gl.expand_dims(ak, 0), mask=keep, other=0.0)
        SHARED: gl.constexpr = gl.NVMMASharedLayout(min(RANK * 2, 128), 16, 2)
        shared = gl.allocate_shared_memory(gl.bfloat16, [BN, RANK], SHARED, xa)
        fence_async_shared()
        _barrier()
        low = warpgroup_mma(b, shared.permute((1, 0)), gl.zeros([BM, BN], gl.float32, layout=LAYOUT))
        acc += low * scaling
    if HAS_BIAS:
        acc += gl.expand_dims(gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32), 1)
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, W], [0, 1])
    y = gl.convert_layout(acc.to(gl.bfloat16), OUT)
    n = n0 + gl.arange(0, BM, layout=gl.SliceLayout(1, OUT))
    m = m0 + gl.arange(0, BN, layout=gl.SliceLayout(0, OUT))
    at = y_ptr + gl.expand_dims(n, 1) + gl.expand_dims(m * stride_ym, 0)
    gl.store(at, y, mask=gl.expand_dims(n < N, 1) & gl.expand_dims(m < M, 0))


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
    GROUPED: gl.constexpr,  # N and TILES are of one expert, and so is row_scale, which then is a number; RANK is 0
    W: gl.constexpr,
):
    T: gl.constexpr = BM // 16
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, BN, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    WORDS: gl.constexpr = _words_layout(T, W)
    SCALES: gl.constexpr = _scales_layout(T, W)
    PRIVATE: gl.constexpr = _private_layout(T, BN, W)

    block = gl.program_id(0)
    split = gl.program_id(1)
    first_tile = 0
    if GROUPED:
        if PDL:
            _grid_dependency("launch_dependents")
            _grid_dependency("wait")
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

    # Addresses of words have 32 bits, enough for 2^34 weights. Tiles past the last are read as the last.
    tile = gl.arange(0, T, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
    tile = (first_tile + gl.minimum(row_block * T + tile, TILES - 1)) * COLUMNS + first * RING
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, WORDS))))
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, WORDS))))
    at = gl.expand_dims(tile * 128, 1) + gl.expand_dims(g * 16, 0)
    at = gl.expand_dims(at, 2) + gl.expand_dims(gl.expand_dims(t * 4, 0), 1)
    w_ptr = words_ptr + gl.expand_dims(at, 3) + gl.expand_dims(gl.expand_dims(gl.expand_dims(j, 0), 1), 2)
    tile = gl.arange(0, T, layout=gl.SliceLayout(1, gl.SliceLayout(2, SCALES)))
    tile = (first_tile + gl.minimum(row_block * T + tile, TILES - 1)) * COLUMNS + first * RING
    g2 = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, SCALES)))
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, SCALES)))
    at = gl.expand_dims(tile * 16, 1) + gl.expand_dims(g2 * 2, 0)
    s_ptr = scales_ptr + gl.expand_dims(at, 2) + gl.expand_dims(gl.expand_dims(half, 0), 1)
    table = 0
    if FORMAT == "nf4":
        lane = gl.expand_dims(gl.expand_dims(g * 4, 0), 2) + gl.expand_dims(gl.expand_dims(t, 0), 1)
        table = gl.expand_dims(gl.load(table_ptr + lane % 16), 3).broadcast_to([T, 8, 4, 4])

    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    xs = gl.allocate_shared_memory(gl.bfloat16, [XBUF, BN, RING * 64], SHARED)
    bars = gl.allocate_shared_memory(gl.int64, [XBUF, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(XBUF):
        mbarrier.init(bars.index(b), count=1)
    fence_async_shared()
    _barrier()

    words, s0, s1 = (), (), ()
    for i in gl.static_range(RING):
        on = first * RING + i < COLUMNS
        w, z0, z1 = _load_column(w_ptr + i * 128, s_ptr + i * 16, on, FORMAT, T, WORDS)
        words, s0, s1 = words + (w,), s0 + (z0,), s1 + (z1,)  # noqa: RUF005
    if PDL and not GROUPED:  # nothing above depends on earlier kernels
        _grid_dependency("launch_dependents")
        _grid_dependency("wait")
    for b in gl.static_range(XBUF):
        _load_activations(x_box, xs, bars, m0, first + b, b, first + b < last, BN, RING)

    acc = gl.zeros([BM, BN], gl.float32, layout=ACC)
    buf = 0
    free = 0
    phase = 0
    for r in range(first, last):
        mbarrier.wait(bars.index(buf), phase)
        w_ptr += RING * 128
        s_ptr += RING * 16
        next_words, next_s0, next_s1 = (), (), ()
        for i in gl.static_range(RING):
            a = _fragment(words[i], s0[i], s1[i], table, FORMAT, T, OPERAND)
            on = (r + 1 < last) & (EVEN | ((r + 1) * RING + i < COLUMNS))
            w, z0, z1 = _load_column(w_ptr + i * 128, s_ptr + i * 16, on, FORMAT, T, WORDS)
            next_words, next_s0, next_s1 = next_words + (w,), next_s0 + (z0,), next_s1 + (z1,)  # noqa: RUF005
            acc = warpgroup_mma(a, xs.index(buf).slice(i * 64, 64, dim=1).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            if OVERLAP and i == 0:  # all warps have finished the previous round: its buffer is free
                _barrier()
                on = (r > first) & (r - 1 + XBUF < last)
                _load_activations(x_box, xs, bars, m0, r - 1 + XBUF, free, on, BN, RING)
        words, s0, s1 = next_words, next_s0, next_s1
        if not OVERLAP:
            acc = warpgroup_mma_wait(0, deps=[acc])
            _barrier()
            _load_activations(x_box, xs, bars, m0, r + XBUF, buf, r + XBUF < last, BN, RING)
        free = buf
        buf += 1
        if buf == XBUF:
            buf = 0
            phase ^= 1
    if OVERLAP:
        acc = warpgroup_mma_wait(0, deps=[acc])
        _barrier()

    n0 = row_block * BM
    if SPLIT == 1:
        _finish(
            acc, row_scale_ptr, bias_ptr, xa_ptr, b_ptr, y_ptr, n0, m0, factor, scaling, M, N, rank, own, end1,
            end2, stride_ym, BM, BN, RANK, HAS_ROW_SCALE and not GROUPED, HAS_BIAS, ACC, W,
        )  # fmt: skip
    else:
        part = partial_ptr + block * (SPLIT * BM * BN) + _private_offsets(BM, BN, PRIVATE, BN)
        gl.store(part + split * (BM * BN), _to_private(acc, BM, BN, PRIVATE), cache_modifier=".cg")
        if not SEPARATE:
            _barrier()
            arrived = gl.atomic_add(counter_ptr + block, 1, sem="acq_rel", scope="gpu")
            if arrived == SPLIT - 1:
                total = gl.load(part, cache_modifier=".cg")
                for i in gl.static_range(1, SPLIT):
                    total += gl.load(part + i * (BM * BN), cache_modifier=".cg")
                gl.atomic_xchg(counter_ptr + block, 0, sem="relaxed", scope="gpu")
                acc = _from_private(total, BM, BN, ACC)
                _finish(
                    acc, row_scale_ptr, bias_ptr, xa_ptr, b_ptr, y_ptr, n0, m0, factor, scaling, M, N, rank, own, end1,
                    end2, stride_ym, BM, BN, RANK, HAS_ROW_SCALE and not GROUPED, HAS_BIAS, ACC, W,
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
):
    """Add the partial sums of 64 rows and PART tokens in the order of K."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PART, 16])
    PRIVATE: gl.constexpr = _private_layout(4, PART, 4)
    block = gl.program_id(0)
    token_blocks = (M + BN - 1) // BN
    n0 = (block // token_blocks) * BM + gl.program_id(1) * 64
    m0 = (block % token_blocks) * BN + gl.program_id(2) * PART
    part = partial_ptr + block * (SPLIT * BM * BN) + gl.program_id(1) * (64 * BN) + gl.program_id(2) * (PART * 16)
    part += _private_offsets(64, PART, PRIVATE, BN)
    if PDL:
        _grid_dependency("launch_dependents")
        _grid_dependency("wait")
    total = gl.load(part, cache_modifier=".cg")
    for i in gl.static_range(1, SPLIT):
        total += gl.load(part + i * (BM * BN), cache_modifier=".cg")
    acc = _from_private(total, 64, PART, ACC)
    _finish(
        acc, row_scale_ptr, bias_ptr, xa_ptr, b_ptr, y_ptr, n0, m0, factor, scaling, M, N, rank, own, end1,
        end2, stride_ym, 64, PART, RANK, HAS_ROW_SCALE, HAS_BIAS, ACC, 4,
    )  # fmt: skip
