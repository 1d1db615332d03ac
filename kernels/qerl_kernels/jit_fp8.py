"""Triton kernels of `fp8`. A program rounds one row, of which it holds a part at a time, dequantizes a part, or
transposes a tile.

The reference divides by the scale. Here inputs are multiplied by its reciprocal and rounded to 17 bits, which gives the
same code: products are off by less than 2^-22 of themselves, and the quotient of two numbers of up to 11 bits is
half-way between two codes, which 5 bits hold, or at least 2^-16 away. Triton's interpreter truncates to E4M3.
"""

import triton
import triton.language as tl

from qerl_kernels.jit_activations import NO_SIGN, nearest_e4m3, with_sign
from qerl_kernels.jit_overlap import wait_for_earlier


@triton.jit
def nearest_bfloat16(x):
    """The bits of the bfloat16 nearest to an FP32, ties to even, as those of an FP32; of NaN any."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000


@triton.jit
def product_of(x, factors, start, here, width):
    """Inputs of a row at columns `here`, times their factors, in FP32."""
    values = tl.load(x + start + here, mask=here < width, other=0.0).to(tl.float32)
    return values * tl.load(factors + here, mask=here < width, other=0.0)


@triton.jit
def write_codes(values, raised, reciprocal, codes, inside, CONVERTS: tl.constexpr):
    """Whether each of the FP32 `values` is zero, and whether its code is, int32; the codes go to `codes`."""
    quotient = (values * raised) * reciprocal
    quotient = ((quotient.to(tl.int32, bitcast=True) + 0x40) & -0x80).to(tl.float32, bitcast=True)
    rounded = quotient
    if not CONVERTS:
        rounded = with_sign(nearest_e4m3(tl.minimum(tl.abs(quotient), 448.0)), quotient)
    tl.store(codes, rounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=inside)
    return (values == 0).to(tl.int32), (tl.abs(quotient) <= 0.0009765625).to(tl.int32)  # half of the least, a tie


@triton.jit
def quantize_row(
    x,  # (M, K), of 16 bits
    codes,  # (M, K) uint8
    scales,  # (M,) FP32
    counts,
    skipped,  # as in `round_row`
    factors,  # (K,) FP32
    width,
    EPSILON: tl.constexpr,
    PART: tl.constexpr,  # inputs held at a time
    PARTS: tl.constexpr,
    SKIPS: tl.constexpr,
    FACTORS: tl.constexpr,  # whether inputs are x * factors, rounded to bfloat16
    CONVERTS: tl.constexpr,  # whether a conversion to E4M3 rounds
    PDL: tl.constexpr,
):
    wait_for_earlier(PDL)
    row = tl.program_id(0)
    start = row.to(tl.int64) * width
    column = tl.arange(0, PART)
    largest = tl.zeros((PART,), tl.int32)  # magnitudes as integers, of which NaN is the largest
    if FACTORS:  # in a loop: unrolled, with two loads each, it would need three times as many registers
        for part in range(PARTS):
            product = product_of(x, factors, start, part * PART + column, width)
            largest = tl.maximum(largest, product.to(tl.int32, bitcast=True) & NO_SIGN)
    else:
        for part in tl.static_range(PARTS):
            here = part * PART + column
            stored = tl.load(x + start + here, mask=here < width, other=0.0)
            largest = tl.maximum(largest, stored.to(tl.float32).to(tl.int32, bitcast=True) & NO_SIGN)
    amax = tl.max(largest, 0).to(tl.float32, bitcast=True)
    finite = amax < float("inf")
    if FACTORS:  # the largest product rounded is the largest rounded product
        amax = nearest_bfloat16(tl.where(finite, amax, 0.0)).to(tl.float32, bitcast=True)
        unit = nearest_bfloat16(tl.div_rn(amax, tl.full((), 448.0, tl.float32))).to(tl.float32, bitcast=True)
    else:
        unit = tl.div_rn(amax, tl.full((), 448.0, tl.float32)).to(x.dtype.element_ty).to(tl.float32)
    unit = tl.where(finite, tl.where(unit == 0, EPSILON, unit), float("nan"))
    raised = tl.where(unit < 2.0**-64, 2.0**64, 1.0)  # or the reciprocal would be infinite
    reciprocal = tl.div_rn(tl.full((), 1.0, tl.float32), unit * raised)
    zeros = tl.zeros((PART,), tl.int32)
    zero_codes = tl.zeros((PART,), tl.int32)
    if FACTORS:
        for part in range(PARTS):
            here = part * PART + column
            values = nearest_bfloat16(product_of(x, factors, start, here, width)).to(tl.float32, bitcast=True)
            zero, zero_code = write_codes(values, raised, reciprocal, codes + start + here, here < width, CONVERTS)
            zeros += zero
            zero_codes += zero_code
    else:
        for part in tl.static_range(PARTS):
            here = part * PART + column
            if PARTS > 1:
                stored = tl.load(x + start + here, mask=here < width, other=0.0)
            values = stored.to(tl.float32)
            zero, zero_code = write_codes(values, raised, reciprocal, codes + start + here, here < width, CONVERTS)
            zeros += zero
            zero_codes += zero_code
    tl.store(scales + row, unit)
    # The first program counts all inputs, and each takes off what does not count of its row: atomic additions to one
    # address follow each other, and most rows have nothing to add.
    padded_zeros = tl.sum(zeros, 0)
    lost, uncounted = tl.sum(zero_codes, 0) - padded_zeros, padded_zeros - (PART * PARTS - width)
    if SKIPS:
        counted = tl.load(skipped + row) == 0
        lost, uncounted = tl.where(counted, lost, 0), tl.where(counted, uncounted, width)
    inputs = tl.where(row == 0, tl.num_programs(0).to(tl.int64) * width, 0) - uncounted
    tl.atomic_add(counts, lost.to(tl.int64), mask=lost != 0)
    tl.atomic_add(counts + 1, inputs, mask=inputs != 0)


@triton.jit
def dequantize_row(
    codes,  # (N, K) uint8
    scales,  # (N,) FP32
    out,  # (N, K) bfloat16, as int16
    width,
    PART: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PART + tl.arange(0, PART)
    stored = tl.load(codes + row * width + column, mask=column < width, other=0)
    product = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32) * tl.load(scales + row)
    tl.store(out + row * width + column, (nearest_bfloat16(product) >> 16).to(tl.int16), mask=column < width)


@triton.jit
def transpose(
    codes,  # (N, K) uint8
    out,  # (K, N) uint8
    rows,
    width,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    tile = tl.load(codes + row[:, None] * width + column[None, :], mask=inside, other=0)
    inside = (column < width)[:, None] & (row < rows)[None, :]
    tl.store(out + column[:, None] * rows + row[None, :], tl.trans(tile), mask=inside)
