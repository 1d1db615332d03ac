"""Triton kernel of `dequantize`. A program handles 16 rows x 256 inputs, four tiles of the kernel layout.

All arithmetic is in FP32 and integers, so Triton's interpreter computes the same bits as a GPU. A word's pairs A..D
(see `layout`) become words of two bfloat16 numbers. The compiler inserts the exchange between threads that makes each
store a whole line.
"""

import triton
import triton.language as tl

NVFP4 = tl.constexpr(0)
MXFP4 = tl.constexpr(1)
NF4 = tl.constexpr(2)
FP8 = tl.constexpr(3)
INT8 = tl.constexpr(4)
INT4 = tl.constexpr(5)
PAIR = tl.constexpr(-2118090304)  # 0x81C081C0: sign, the two lowest exponent bits, the highest mantissa bit


@triton.jit
def bfloat16_pair(low, high, ROUND: tl.constexpr):
    """Two FP32 as one word of two bfloat16; with ROUND to nearest, ties to even, otherwise truncated."""
    low = low.to(tl.int32, bitcast=True)
    high = high.to(tl.int32, bitcast=True)
    if ROUND:
        low += 0x7FFF + ((low >> 16) & 1)
        high += 0x7FFF + ((high >> 16) & 1)
    return ((low >> 16) & 0xFFFF) | (high & -65536)


@triton.jit
def e2m1_pair(bits, scale):
    """Two E2M1 codes, given as bfloat16 x 2^-126 in a word, times `scale`."""
    low = (bits << 16).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    high = (bits & -65536).to(tl.float32, bitcast=True) * 8.507059173023462e37
    return bfloat16_pair(low * scale, high * scale, False)


@triton.jit
def nf4_pair(codes, scale, table):
    """The entries of `table` at two indices, one in each half of a word, times `scale`."""
    low = tl.load(table + (codes & 0xF))
    high = tl.load(table + ((codes >> 16) & 0xF))
    return bfloat16_pair(low * scale, high * scale, True)


@triton.jit
def symmetric_value(code, FORMAT: tl.constexpr):
    """FP32 of the code in the lowest 4 or 8 bits of a word."""
    if FORMAT == FP8:
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    elif FORMAT == INT8:
        return ((code << 24) >> 24).to(tl.float32)
    else:
        return ((code & 0xF) - 8).to(tl.float32)


@triton.jit
def symmetric_pair(codes, scale, FORMAT: tl.constexpr):
    """The codes in the lowest bits of the halves of a word times `scale`."""
    low = symmetric_value(codes, FORMAT)
    return bfloat16_pair(low * scale, symmetric_value(codes >> 16, FORMAT) * scale, True)


@triton.jit
def load_scale(scales, at, inside, offset, FORMAT: tl.constexpr):
    if FORMAT >= NF4:
        scale = tl.load(scales + at, mask=inside, other=0)
        if scale.dtype == tl.int16:  # bits of bfloat16
            return (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        return scale.to(tl.float32)
    byte = tl.load(scales + at, mask=inside, other=0).to(tl.int32)
    if FORMAT == NVFP4:
        return (byte << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    exponent = byte - offset
    return tl.where(exponent > 0, exponent << 23, 0x400000).to(tl.float32, bitcast=True)


@triton.jit
def dequantize(
    words,  # int32 (T, C, 32, 4), of 8 bits (T, C, 64, 4)
    scales,  # in the shapes of `layout`; bfloat16 as int16
    table,  # FP32 (16,), used by NF4 only
    out,  # (N, K) bfloat16, as int32 (N, K / 2)
    rows,
    half_width,  # K / 2
    columns,  # C
    offset,
    FORMAT: tl.constexpr,
    S: tl.constexpr,  # scales per row of a tile, for its 64 inputs; 0: not of each row, or not of each tile
    SHARED: tl.constexpr,  # columns of tiles with the same scales; 0: all
):
    tile = tl.program_id(1)
    c = tl.program_id(0) * 4 + tl.arange(0, 4)[:, None, None, None]
    g = tl.arange(0, 8)[None, :, None, None]
    t = tl.arange(0, 4)[None, None, :, None]
    j = tl.arange(0, 4)[None, None, None, :]
    inside = c < columns
    here = tile.to(tl.int64) * columns + c
    BYTES: tl.constexpr = FORMAT > NF4 and FORMAT < INT4
    words += here * (256 if BYTES else 128) + g * 16 + t * 4 + j
    w = tl.load(words, mask=inside, other=0)
    BELOW: tl.constexpr = S if SHARED > 0 else 8  # from the scale of a row to that of 8 rows further down
    if SHARED == 0:
        at = tile * 16 + g + (c + t + j) * 0
    else:
        at = (tile.to(tl.int64) * (columns // SHARED) + c // SHARED) * max(16 * S, 1) + g * (2 * S) + j * S // 4 + t * 0
    upper = load_scale(scales, at, inside, offset, FORMAT)  # of rows 0..7
    lower = load_scale(scales, at + BELOW, inside, offset, FORMAT)
    if FORMAT == NF4:
        a = nf4_pair(w, upper, table)
        b = nf4_pair(w >> 4, lower, table)
        a2 = nf4_pair(w >> 8, upper, table)
        b2 = nf4_pair(w >> 12, lower, table)
    elif FORMAT == INT4:
        a = symmetric_pair(w, upper, FORMAT)
        b = symmetric_pair(w >> 4, lower, FORMAT)
        a2 = symmetric_pair(w >> 8, upper, FORMAT)
        b2 = symmetric_pair(w >> 12, lower, FORMAT)
    elif BYTES:
        w2 = tl.load(words + 128, mask=inside, other=0)
        a = symmetric_pair(w, upper, FORMAT)
        b = symmetric_pair(w >> 8, lower, FORMAT)
        a2 = symmetric_pair(w2, upper, FORMAT)
        b2 = symmetric_pair(w2 >> 8, lower, FORMAT)
    else:
        a = e2m1_pair(w & PAIR, upper)
        b = e2m1_pair((w << 3) & PAIR, lower)
        a2 = e2m1_pair((w << 6) & PAIR, upper)
        b2 = e2m1_pair((((w >> 3) ^ (w >> 7)) & 0x01C001C0) | ((w << 1) & -2147450880), lower)  # 0x80008000
    pairs = tl.join(tl.join(a, b), tl.join(a2, b2))  # (tile, g, t, j, row half, input half)
    pairs = pairs.permute(4, 1, 0, 3, 5, 2).reshape(16, 128)
    row = tile * 16 + tl.arange(0, 16)[:, None]
    column = tl.program_id(0) * 128 + tl.arange(0, 128)[None, :]
    tl.store(out + row.to(tl.int64) * half_width + column, pairs, mask=(row < rows) & (column < half_width))
