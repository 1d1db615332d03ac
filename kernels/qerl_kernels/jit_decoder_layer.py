"""Triton kernels of `decoder_layer`. They round where the plain modules do: after each operation."""

import triton
import triton.language as tl


@triton.jit
def add_norm(
    x, delta, weight, total, normed, width, epsilon,
    ADD: tl.constexpr, UNIT_OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of x (n, H): total = x + delta, normed = total / rms(total) * (weight or 1 + weight)."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    h = tl.load(x + row + column, mask=inside, other=0.0)
    if ADD:
        d = tl.load(delta + row + column, mask=inside, other=0.0)
        h = (h.to(tl.float32) + d.to(tl.float32)).to(h.dtype)
        tl.store(total + row + column, h, mask=inside)
    wide = h.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + epsilon)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    out = scaled * (1.0 + w) if UNIT_OFFSET else scaled.to(h.dtype).to(tl.float32) * w
    tl.store(normed + row + column, out.to(h.dtype), mask=inside)


@triton.jit
def gated(gate, up, out, width, gate_stride, up_stride, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """A part of one row of silu(gate) * up, or gelu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0)
    wide = g.to(tl.float32)
    exponent = wide
    if GELU:  # with tanh: (1 + tanh(y)) / 2 is the logistic function of 2 y, y = sqrt(2 / pi) (x + 0.044715 x^3)
        exponent = tl.maximum(1.5957691216057308 * (wide + 0.044715 * wide * wide * wide), -80.0)
    activated = (wide / (1.0 + tl.exp(-exponent))).to(g.dtype)
    product = (activated.to(tl.float32) * u.to(tl.float32)).to(g.dtype)
    tl.store(out + row * width + column, product, mask=inside)


@triton.jit
def rotate_head(source, target, cos, sin, D: tl.constexpr, HALF: tl.constexpr):
    """Rotate one head of D numbers by angles with the given cosines and sines."""
    low = tl.arange(0, HALF)
    high = low + D // 2
    inside = low < D // 2
    x = tl.load(source + low, mask=inside, other=0.0)
    y = tl.load(source + high, mask=inside, other=0.0)
    dtype = x.dtype
    a, b = x.to(tl.float32), y.to(tl.float32)
    cos_low = tl.load(cos + low, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + low, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + high, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + high, mask=inside, other=0.0).to(tl.float32)
    first = (a * cos_low).to(dtype).to(tl.float32) - (b * sin_low).to(dtype).to(tl.float32)
    second = (b * cos_high).to(dtype).to(tl.float32) + (a * sin_high).to(dtype).to(tl.float32)
    tl.store(target + low, first.to(dtype), mask=inside)
    tl.store(target + high, second.to(dtype), mask=inside)


@triton.jit
def rotate_store(
    q, k, v, cos, sin, starts, slot, keys, values, rotated, width, q_stride, k_stride, v_stride,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One head of one row: the rotated query goes to `rotated`, key and value to `slot` of the cache."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = tl.load(slot)
    angle = (place - tl.load(starts + row)) * D
    if head < HEADS:
        target = rotated + (row * HEADS + head) * D
        rotate_head(q + row * q_stride + head * D, target, cos + angle, sin + angle, D, HALF)
    elif head < HEADS + KV:
        own = head - HEADS
        target = keys + ((row * KV + own) * width + place) * D
        rotate_head(k + row * k_stride + own * D, target, cos + angle, sin + angle, D, HALF)
    else:
        own = head - HEADS - KV
        column = tl.arange(0, DIM)
        x = tl.load(v + row * v_stride + own * D + column, mask=column < D, other=0.0)
        tl.store(values + ((row * KV + own) * width + place) * D + column, x, mask=column < D)


@triton.jit
def attend(
    q, keys, values, starts, slot, out, partial, maxima, total, factor, width, window,
    KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Query heads that share one key head of one row, over one of SPLITS ranges of the slots that the row may see."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    head = row * KV + tl.program_id(1)  # of the keys
    end = tl.load(slot).to(tl.int32) + 1
    start = tl.maximum(tl.load(starts + row).to(tl.int32), end - window)
    share = tl.cdiv(tl.cdiv(end - start, SPLITS), BLOCK) * BLOCK
    low = start + split * share
    high = tl.minimum(low + share, end)

    member = tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    these = (head * GROUP + member) * D
    real = (member < GROUP)[:, None] & (d < D)[None, :]
    query = tl.load(q + these[:, None] + d[None, :], mask=real, other=0.0)
    key_base = keys + head * width * D
    value_base = values + head * width * D
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DIM), tl.float32)
    for at in range(low, high, BLOCK):
        column = at + tl.arange(0, BLOCK)
        inside = column < high
        key = tl.load(key_base + column[None, :] * D + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
        scores = tl.dot(query, key, input_precision="ieee") * factor
        scores = tl.where(inside[None, :], scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(highest - higher)
        sums = sums * fade + tl.sum(weights, 1)
        mask = inside[:, None] & (d < D)[None, :]
        value = tl.load(value_base + column[:, None] * D + d[None, :], mask=mask, other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        highest = higher
    if SPLITS == 1:
        tl.store(out + these[:, None] + d[None, :], (mixed / sums[:, None]).to(query.dtype), mask=real)
    else:
        part = (head * GROUP + member) * SPLITS + split
        tl.store(partial + part[:, None] * D + d[None, :], mixed, mask=real)
        tl.store(maxima + part, highest, mask=member < GROUP)
        tl.store(total + part, sums, mask=member < GROUP)


@triton.jit
def combine_splits(partial, maxima, total, out, D: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """Combine the ranges of `attend` for one query head, each weighted by its part of the softmax."""
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, DIM)
    tops = tl.load(maxima + head * SPLITS + split)  # -inf for a range without keys
    shares = tl.exp2(tops - tl.max(tops, 0))
    sums = tl.sum(tl.load(total + head * SPLITS + split) * shares, 0)
    at = (head * SPLITS + split)[:, None] * D + d[None, :]
    parts = tl.load(partial + at, mask=(d < D)[None, :], other=0.0)
    mixed = tl.sum(parts * shares[:, None], 0) / sums
    tl.store(out + head * D + d, mixed.to(out.dtype.element_ty), mask=d < D)
