"""What the two decode GEMMs share: from packed words in memory to the operand of a tensor core.

`jit_decode` (wgmma) and `jit_decode_mma` (mma.sync) multiply in loops of their own. Words of W are in the order of both
instructions' A operand (`layout`), so a lane loads what it multiplies and turns it into bfloat16 with masks and a
product with the scale, which a whole row may have in common: then the sums are multiplied by it (`jit_decode_end`).
Left out: an interpreter, which Gluon lacks.
"""
# Triton's compiler wants constexpr annotations, although calls pass plain numbers.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
def powers(rank, axis, first, end):
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
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], *powers(4, 0, warps, tiles)],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        warp_bases=powers(4, 0, 1, warps),
        block_bases=[],
        shape=[tiles, 8, 4, 4],
    )


@gluon.constexpr_function
def scales_layout(tiles, warps):
    """(tiles, g, row half): the four lanes of each g read the same."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], *powers(3, 0, warps, tiles)],
        lane_bases=[[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=powers(3, 0, 1, warps),
        block_bases=[],
        shape=[tiles, 8, 2],
    )


@gluon.constexpr_function
def sums_layout(tokens, warps, wgmma):
    """Sums (rows, tokens) of one instruction or the other; a warp has 16 rows at a time."""
    if wgmma:
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, tokens, 16])
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


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
def fence_async_global():
    """What this thread sees in global memory, copies that it starts see too."""
    gl.inline_asm_elementwise("fence.proxy.async.global; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def grid_dependency(WHAT: gl.constexpr):
    """Programmatic dependent launch: `wait` for earlier kernels, or let the next one start (`launch_dependents`)."""
    gl.inline_asm_elementwise("griddepcontrol." + WHAT + "; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
