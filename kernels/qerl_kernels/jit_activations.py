"""Triton kernel of `activations`. One program rounds one row, so rows do not depend on each other.

Divisions are those of IEEE and nothing is fused, so that the bits are those of the reference. E4M3 is rounded by
arithmetic on FP32, since cards before sm_89 cannot convert to it. Rows of more than about 8,192
inputs spill some registers.
"""

import triton
import triton.language as tl

from qerl_kernels.jit_overlap import wait_for_earlier

NO_SIGN = tl.constexpr(0x7FFFFFFF)
TO_INTEGER = tl.constexpr(1.5 * 2**23)  # x + this - this is x rounded to an integer, ties to even
TO_SUBNORMAL = tl.constexpr(1.5 * 2**14)  # and here to a multiple of 2^-9, the least E4M3


@triton.jit
def with_sign(magnitude, x):
    """`magnitude`, at least 0, with the sign of the FP32 `x`."""
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def nearest_e4m3(x):
    """The E4M3 nearest to an FP32 magnitude of at most 448, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(x < 0.015625, (x + TO_SUBNORMAL) - TO_SUBNORMAL, normal)


@triton.jit
def nearest_e2m1(x):
    """The E2M1 nearest to an FP32 magnitude, ties to the even code, saturating at 6."""
    least = tl.where(x > 0.25, 0.5, 0.0) + tl.where(x >= 0.75, 0.5, 0.0) + tl.where(x > 1.25, 0.5, 0.0)
    middle = tl.where(x >= 1.75, 0.5, 0.0) + tl.where(x > 2.5, 1.0, 0.0) + tl.where(x >= 3.5, 1.0, 0.0)
    return least + middle + tl.where(x > 5.0, 2.0, 0.0)


@triton.jit
def round_row(
    x,  # (M, K)
    y,  # (M, K)
    counts,  # (2,) int64
    skipped,  # (M,) int64, not 0 in rows that do not count; anything without SKIPS
    width,
    KIND: tl.constexpr,
    EPSILON: tl.constexpr,  # of the dtype of x
    B: tl.constexpr,  # inputs of a block
    BLOCKS: tl.constexpr,  # a power of two, at least K / B
    SKIPS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier(PDL)
    start = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCKS)[:, None] * B + tl.arange(0, B)[None, :]
    stored = tl.load(x + start + column, mask=column < width, other=0.0)
    values = stored.to(tl.float32)
    bits = values.to(tl.int32, bitcast=True) & NO_SIGN
    magnitudes = bits.to(tl.float32, bitcast=True)
    amax_bits = tl.max(bits, 1)  # (BLOCKS,) as integers, of which NaN is the largest
    if KIND == "mxfp4":
        byte = tl.minimum(tl.maximum(((amax_bits + (1 << 21)) >> 23) - 2, 0), 252)
        unit = tl.where(byte == 0, 0x400000, byte << 23).to(tl.float32, bitcast=True)[:, None]
        reciprocal = ((254 - byte) << 23).to(tl.float32, bitcast=True)[:, None]  # a power of two too, so exact
        grid = with_sign(nearest_e2m1(magnitudes * reciprocal), values)
    elif KIND == "nvfp4":
        largest = tl.max(amax_bits, 0).to(tl.float32, bitcast=True)
        of_token = tl.div_rn(largest, tl.full((), 2688.0, tl.float32))
        of_token = tl.where(of_token == 0, 1.0, of_token)
        wanted = tl.div_rn(amax_bits.to(tl.float32, bitcast=True), tl.full((BLOCKS,), 6.0, tl.float32))
        wanted = tl.div_rn(wanted, tl.broadcast_to(of_token, (BLOCKS,)))
        scale = nearest_e4m3(tl.minimum(tl.maximum(wanted, 0.015625), 448.0))
        reciprocal = tl.div_rn(tl.full((), 1.0, tl.float32), of_token)
        reciprocal = tl.div_rn(tl.broadcast_to(reciprocal, (BLOCKS,)), scale)[:, None]
        unit = (scale * of_token)[:, None]
        grid = with_sign(nearest_e2m1(magnitudes * reciprocal), values)
    else:
        largest = tl.max(amax_bits, 0).to(tl.float32, bitcast=True)
        span = tl.full((), 448.0 if KIND == "fp8" else 127.5, tl.float32)
        unit = tl.div_rn(largest, span).to(stored.dtype).to(tl.float32)
        if KIND == "fp8":
            unit = tl.where(unit == 0, EPSILON, unit)
            quotient = tl.div_rn(magnitudes, tl.broadcast_to(unit, (BLOCKS, B)))
            grid = with_sign(nearest_e4m3(tl.minimum(quotient, 448.0)), values)
        else:
            unit = tl.where(unit < 1.1920928955078125e-07, 1.1920928955078125e-07, unit)  # and NaN stays
            scaled = values * tl.div_rn(tl.full((), 1.0, tl.float32), unit)
            grid = tl.minimum(tl.maximum((scaled + TO_INTEGER) - TO_INTEGER, -128.0), 127.0)
    rounded = tl.where(bits < 0x7F800000, (grid * unit).to(stored.dtype), stored)
    tl.store(y + start + column, rounded, mask=column < width)
    inputs = bits != 0
    if SKIPS:
        inputs = inputs & (tl.load(skipped + tl.program_id(0)) == 0)
    lost = inputs & (rounded.to(tl.float32) == 0)
    tl.atomic_add(counts, tl.sum(tl.sum(lost.to(tl.int32), 1), 0).to(tl.int64))
    tl.atomic_add(counts + 1, tl.sum(tl.sum(inputs.to(tl.int32), 1), 0).to(tl.int64))
