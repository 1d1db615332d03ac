"""Triton kernels of `grouped`: rows sorted by expert, and a GEMM that reads the weights of the chosen experts only.

A program multiplies BM rows of one expert's weight by up to BN of the rows that chose this expert, y^T = W x^T. A tile
of 16 rows and 64 inputs is decoded in the order of the kernel layout (`layout`), which is that of the tensor core's
operand. With float32 activations all arithmetic is in FP32 and integers, so that Triton's interpreter can run it. On
Hopper packed weights are multiplied by `jit_decode` instead.
"""

import triton
import triton.language as tl

from qerl_kernels.jit_dequantize import MXFP4, NF4

BF16 = tl.constexpr(3)
PAIR = tl.constexpr(-2118090304)  # 0x81C081C0, see jit_dequantize
COLUMN = tl.constexpr(64)  # inputs of a tile


@triton.jit(do_not_specialize=["count", "chosen", "experts", "blocks"])
def sort_rows(
    ids,  # (count,) expert of each row
    tokens,  # int32 (count,): token of each row in the order of experts
    places,  # int32 (count,): where in that order a row is
    starts,  # int32 (experts + 1,): where the rows of each expert start in it
    items,  # int32 (blocks, 3): an expert, and where up to ROWS of its rows begin and end; unused ones have expert -1
    count,
    chosen,  # rows of a token
    experts,
    blocks,
    EXPERTS: tl.constexpr,  # `experts` rounded up to a power of two
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counting: a row's place is the number of rows before it. The first program counts the rows of each expert."""
    if tl.program_id(0) > 0:
        n = (tl.program_id(0) - 1) * BLOCK + tl.arange(0, BLOCK)
        mine = tl.load(ids + n, mask=n < count, other=0).to(tl.int32)[:, None]
        place = tl.zeros([BLOCK], tl.int32)
        for first in range(0, count, BLOCK):
            j = first + tl.arange(0, BLOCK)
            other = tl.load(ids + j, mask=j < count, other=2147483647).to(tl.int32)[None, :]
            place += tl.sum(((other < mine) | ((other == mine) & (j[None, :] < n[:, None]))).to(tl.int32), 1)
        tl.store(places + n, place, mask=n < count)
        tl.store(tokens + place, n // chosen, mask=n < count)
    else:
        e = tl.arange(0, EXPERTS)
        start = tl.zeros([EXPERTS], tl.int32)
        length = tl.zeros([EXPERTS], tl.int32)
        for first in range(0, count, BLOCK):
            j = first + tl.arange(0, BLOCK)
            other = tl.load(ids + j, mask=j < count, other=2147483647).to(tl.int32)[None, :]
            start += tl.sum((other < e[:, None]).to(tl.int32), 1)
            length += tl.sum((other == e[:, None]).to(tl.int32), 1)
        tl.store(starts + e, start, mask=e < experts)
        tl.store(starts + experts, count)
        needed = (length + ROWS - 1) // ROWS
        ends = tl.cumsum(needed)
        for first in range(0, blocks, BLOCK):
            i = first + tl.arange(0, BLOCK)
            expert = tl.sum((ends[None, :] <= i[:, None]).to(tl.int32), 1)
            mine = expert[:, None] == e[None, :]
            begin = tl.sum(tl.where(mine, start[None, :] + (i[:, None] - (ends - needed)[None, :]) * ROWS, 0), 1)
            end = tl.minimum(begin + ROWS, tl.sum(tl.where(mine, (start + length)[None, :], 0), 1))
            tl.store(items + 3 * i, tl.where(expert < experts, expert, -1), mask=i < blocks)
            tl.store(items + 3 * i + 1, begin, mask=i < blocks)
            tl.store(items + 3 * i + 2, end, mask=i < blocks)


@triton.jit
def bfloat16_rounded(x):
    """FP32 rounded to the nearest bfloat16, ties to even, as FP32."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def decoded_pair(bits, scale, table, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """The two weights in the halves of a word times `scale`, along a new last axis."""
    if FORMAT == NF4:
        low = tl.load(table + (bits & 0xF)) * scale
        high = tl.load(table + ((bits >> 16) & 0xF)) * scale
        if tl.float32 == DTYPE:
            low, high = bfloat16_rounded(low), bfloat16_rounded(high)
    else:
        low = (bits << 16).to(tl.float32, bitcast=True) * scale
        high = (bits & -65536).to(tl.float32, bitcast=True) * scale
    return tl.join(low.to(DTYPE), high.to(DTYPE))


@triton.jit
def block_scales(word, half, FORMAT: tl.constexpr):
    """FP32 scales (.., 4) of four words of codes: for nvfp4 x 2^118, for mxfp4 x 2^offset."""
    j = tl.arange(0, 4)[None, None, None, :]
    if FORMAT == NF4:
        scale = (word + j * 0).to(tl.float32, bitcast=True)
    elif FORMAT == MXFP4:
        scale = (((word >> (half * 16 + j // 2 * 8)) & 0xFF) << 23).to(tl.float32, bitcast=True)
    else:
        scale = (((word >> (j * 8)) & 0xFF) << 20).to(tl.float32, bitcast=True)
        scale *= 6.646139978924579e35  # 2^119
        scale *= 6.646139978924579e35
    return scale


@triton.jit
def decoded_tiles(words, scales, table, FORMAT: tl.constexpr, T: tl.constexpr, DTYPE: tl.constexpr):
    """The operand (16 T, 64) x 2^-exponent (`layout`) from pointers to words (T, 8, 4, 4) and to those of scales."""
    w = tl.load(words)
    first = tl.load(scales)
    second = first if FORMAT == MXFP4 else tl.load(scales + 1)
    upper = block_scales(first, 0, FORMAT)  # of rows 0..7 of each tile
    lower = block_scales(second, 1, FORMAT)
    if FORMAT == NF4:
        a = decoded_pair(w, upper, table, FORMAT, DTYPE)
        b = decoded_pair(w >> 4, lower, table, FORMAT, DTYPE)
        c = decoded_pair(w >> 8, upper, table, FORMAT, DTYPE)
        d = decoded_pair(w >> 12, lower, table, FORMAT, DTYPE)
    else:
        a = decoded_pair(w & PAIR, upper, table, FORMAT, DTYPE)
        b = decoded_pair((w << 3) & PAIR, lower, table, FORMAT, DTYPE)
        c = decoded_pair((w << 6) & PAIR, upper, table, FORMAT, DTYPE)
        bits = (((w >> 3) ^ (w >> 7)) & 0x01C001C0) | ((w << 1) & -2147450880)  # 0x80008000
        d = decoded_pair(bits, lower, table, FORMAT, DTYPE)
    tiles = tl.join(tl.join(a, b), tl.join(c, d))  # tile, g, t, j, parity, row half, input half
    return tiles.permute(0, 5, 1, 3, 6, 2, 4).reshape(16 * T, 64)


@triton.jit(do_not_specialize=["columns"])
def grouped_gemm(
    x,  # (S, K) in the order of experts
    words,  # int32 (experts * N / 16, C, 32, 4), or bfloat16 (experts, N, K) of any strides
    scales,  # int32 (.., 8, PER_ROW): block scales of rows g and g + 8 of a tile
    table,  # FP32 (16,), used by NF4 only
    items,
    expert_scale,  # FP32 (experts,)
    bias,  # (experts, N)
    y,  # (S, N)
    factor,
    rows,  # N
    width,  # K
    columns,  # C
    stride_x,
    stride_expert,  # of bfloat16 weights
    stride_n,
    stride_k,
    FORMAT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    EVEN: tl.constexpr,  # K is a multiple of 64
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    items += tl.program_id(0) * 3
    expert = tl.load(items)
    if expert < 0:
        return
    place = tl.load(items + 1) + tl.arange(0, BN)
    live = place < tl.load(items + 2)
    row = tl.where(live, place, 0).to(tl.int64)[:, None]
    k = tl.arange(0, COLUMN)
    x += row * stride_x + k[None, :]
    DTYPE: tl.constexpr = x.dtype.element_ty
    n0 = tl.program_id(1) * BM
    if FORMAT == BF16:
        n = tl.minimum(n0 + tl.arange(0, BM), rows - 1)
        words += expert.to(tl.int64) * stride_expert + n.to(tl.int64)[:, None] * stride_n + k[None, :] * stride_k
    else:
        T: tl.constexpr = BM // 16
        PER_ROW: tl.constexpr = 1 if FORMAT == MXFP4 else 2
        tiles = rows // 16
        tile = tl.minimum(n0 // 16 + tl.arange(0, T), tiles - 1)
        g = tl.arange(0, 8)[None, :, None, None]
        t = tl.arange(0, 4)[None, None, :, None]
        j = tl.arange(0, 4)[None, None, None, :]
        at = (expert.to(tl.int64) * tiles + tile)[:, None, None, None] * columns
        words += at * 128 + g * 16 + t * 4 + j
        scales += (at * 8 + g) * PER_ROW
    acc = tl.zeros([BM, BN], tl.float32)
    for c in range(columns):
        mask = None if EVEN else (k < width - c * 64)[None, :]
        if FORMAT == BF16:
            w = tl.load(words + c * 64 * stride_k, mask=mask, other=None if EVEN else 0.0).to(DTYPE)
        else:
            w = decoded_tiles(words + c * 128, scales + c * (8 * PER_ROW), table, FORMAT, T, DTYPE)
        part = tl.load(x + c * 64, mask=mask, other=None if EVEN else 0.0)
        acc = tl.dot(w, tl.trans(part), acc, input_precision="ieee")
    if HAS_SCALE:
        factor *= tl.load(expert_scale + expert)
    acc *= factor
    n = n0 + tl.arange(0, BM)
    if HAS_BIAS:
        acc += tl.load(bias + expert * rows + n, mask=n < rows, other=0.0).to(tl.float32)[:, None]
    inside = live[:, None] & (n < rows)[None, :]
    tl.store(y + row * rows + n[None, :], tl.trans(acc).to(y.dtype.element_ty), mask=inside)
