"""Triton kernels of `decoder_layer`. They round where the plain modules do: after each operation."""

import triton
import triton.language as tl

from qerl_kernels.jit_overlap import wait_for_earlier


@triton.jit
def add_norm(
    x, delta, weight, total, normed, width, epsilon,
    ADD: tl.constexpr, UNIT_OFFSET: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of x (n, H): total = x + delta, normed = total / rms(total) * (weight or 1 + weight)."""
    wait_for_earlier(PDL)
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
def gated(gate, up, out, width, gate_stride, up_stride, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A part of one row of silu(gate) * up, or gelu(gate) * up."""
    wait_for_earlier(PDL)
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
    q, k, v, cos, sin, positions, table, keys, values, rotated, columns, q_stride, k_stride, v_stride,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One head of one row: the rotated query goes to `rotated`, key and value to the page of the row's position."""
    wait_for_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + row)
    page = tl.load(table + row * columns + position // PAGE).to(tl.int64)
    slot = position % PAGE
    angle = position * D
    if head < HEADS:
        target = rotated + (row * HEADS + head) * D
        rotate_head(q + row * q_stride + head * D, target, cos + angle, sin + angle, D, HALF)
    elif head < HEADS + KV:
        own = head - HEADS
        target = keys + ((page * KV + own) * PAGE + slot) * D
        rotate_head(k + row * k_stride + own * D, target, cos + angle, sin + angle, D, HALF)
    else:
        own = head - HEADS - KV
        column = tl.arange(0, DIM)
        x = tl.load(v + row * v_stride + own * D + column, mask=column < D, other=0.0)
        tl.store(values + ((page * KV + own) * PAGE + slot) * D + column, x, mask=column < D)


@triton.jit
def attend_range(
    query, keys, values, pages, head, first, low, high, factor,
    KV: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """`query` (ROWS, DIM) over the keys from `low` to `high`, each from its own `first` (ROWS,).

    Returns sums of weighted values (ROWS, DIM), the largest scores (ROWS,), -inf where no key is seen, and the sums of
    the weights (ROWS,). Scores are in powers of two.
    """
    d = tl.arange(0, DIM)
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DIM), tl.float32)
    for at in range(low // BLOCK * BLOCK, high, BLOCK):
        page = tl.load(pages + at // PAGE).to(tl.int64)
        slot = at % PAGE + tl.arange(0, BLOCK)
        column = at + tl.arange(0, BLOCK)
        inside = (column >= low) & (column < high)
        base = (page * KV + head) * PAGE * D
        key_mask = inside[None, :] & (d < D)[:, None]
        key = tl.load(keys + base + slot[None, :] * D + d[:, None], mask=key_mask, other=0.0)
        scores = tl.dot(query, key, input_precision="ieee") * factor
        scores = tl.where(inside[None, :] & (column[None, :] >= first[:, None]), scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        anchor = tl.where(higher == -float("inf"), 0.0, higher)  # or -inf minus -inf would be NaN
        weights = tl.exp2(scores - anchor[:, None])
        fade = tl.exp2(highest - anchor)
        sums = sums * fade + tl.sum(weights, 1)
        mask = inside[:, None] & (d < D)[None, :]
        value = tl.load(values + base + slot[:, None] * D + d[None, :], mask=mask, other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        highest = higher
    return mixed, highest, sums


@triton.jit
def attend_own(
    q, keys, values, table, lengths, prefixes, partial, maxima, total, factor, window, columns, pieces,
    KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Query heads that share one key head of one row, over pieces of the keys behind its prefix."""
    wait_for_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    end = tl.load(lengths + row).to(tl.int32) + 1
    prefix = tl.load(prefixes + row).to(tl.int32)
    first = tl.maximum(prefix, end - window)
    member = tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    these = (row * KV + head) * GROUP + member
    real = (member < GROUP)[:, None] & (d < D)[None, :]
    query = tl.load(q + these[:, None] * D + d[None, :], mask=real, other=0.0)
    starts = tl.zeros((ROWS,), tl.int32) + first
    before = tl.cdiv(prefix, PIECE)
    for piece in range((first - prefix) // PIECE + tl.program_id(2), tl.cdiv(end - prefix, PIECE), tl.num_programs(2)):
        low = tl.maximum(prefix + piece * PIECE, first)
        high = tl.minimum(prefix + (piece + 1) * PIECE, end)
        mixed, highest, sums = attend_range(
            query, keys, values, table + row * columns, head, starts, low, high, factor, KV, D, ROWS, DIM, BLOCK, PAGE
        )
        part = these * pieces + before + piece
        tl.store(partial + part[:, None] * D + d[None, :], mixed, mask=real)
        tl.store(maxima + part, highest, mask=member < GROUP)
        tl.store(total + part, sums, mask=member < GROUP)


@triton.jit
def attend_prefix(
    q, keys, values, table, lengths, prefixes, clusters, partial, maxima, total, factor, window, columns, pieces,
    KV: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Query heads that share one key head, of all rows of one cluster, over pieces of their common prefix."""
    wait_for_earlier(PDL)
    cluster = clusters + tl.program_id(0) * MEMBERS
    head = tl.program_id(1)
    leader = tl.load(cluster).to(tl.int64)
    if leader >= 0:
        prefix = tl.load(prefixes + leader).to(tl.int32)
        place = tl.arange(0, ROWS)
        member = place // GROUP
        d = tl.arange(0, DIM)
        row = tl.load(cluster + member, mask=member < MEMBERS, other=-1).to(tl.int64)
        length = tl.load(lengths + row, mask=row >= 0, other=0).to(tl.int32)
        first = tl.where(row >= 0, tl.maximum(length + 1 - window, 0), prefix)
        these = (row * KV + head) * GROUP + place % GROUP
        real = (row >= 0)[:, None] & (d < D)[None, :]
        query = tl.load(q + these[:, None] * D + d[None, :], mask=real, other=0.0)
        lowest = tl.min(first, 0)
        for piece in range(lowest // PIECE + tl.program_id(2), tl.cdiv(prefix, PIECE), tl.num_programs(2)):
            low = tl.maximum(piece * PIECE, lowest)
            high = tl.minimum((piece + 1) * PIECE, prefix)
            mixed, highest, sums = attend_range(
                query, keys, values, table + leader * columns, head, first, low, high, factor,
                KV, D, ROWS, DIM, BLOCK, PAGE,
            )  # fmt: skip
            part = these * pieces + piece
            tl.store(partial + part[:, None] * D + d[None, :], mixed, mask=real)
            tl.store(maxima + part, highest, mask=row >= 0)
            tl.store(total + part, sums, mask=row >= 0)


@triton.jit
def combine_pieces(
    partial, maxima, total, lengths, prefixes, out, window, pieces,
    HEADS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, PIECE: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Combine the pieces that one query head of one row sees, in order, each weighted by its part of the softmax."""
    wait_for_earlier(PDL)
    head = tl.program_id(0).to(tl.int64)
    row = head // HEADS
    end = tl.load(lengths + row).to(tl.int32) + 1
    prefix = tl.load(prefixes + row).to(tl.int32)
    first = tl.maximum(end - window, 0)
    before = tl.cdiv(prefix, PIECE)
    start = tl.where(first < prefix, first // PIECE, before + (first - prefix) // PIECE)
    stop = before + tl.cdiv(end - prefix, PIECE)
    d = tl.arange(0, DIM)
    highest = tl.full((), -float("inf"), tl.float32)
    sums = tl.zeros((), tl.float32)
    mixed = tl.zeros((DIM,), tl.float32)
    for at in range(start, stop, CHUNK):
        piece = at + tl.arange(0, CHUNK)
        inside = piece < stop
        part = head * pieces + piece
        tops = tl.load(maxima + part, mask=inside, other=-float("inf"))
        higher = tl.maximum(highest, tl.max(tops, 0))
        anchor = tl.where(higher == -float("inf"), 0.0, higher)
        shares = tl.exp2(tops - anchor)
        fade = tl.exp2(highest - anchor)
        sums = sums * fade + tl.sum(tl.load(total + part, mask=inside, other=0.0) * shares, 0)
        mask = inside[:, None] & (d < D)[None, :]
        parts = tl.load(partial + part[:, None] * D + d[None, :], mask=mask, other=0.0)
        mixed = mixed * fade + tl.sum(parts * shares[:, None], 0)
        highest = higher
    tl.store(out + head * D + d, (mixed / sums).to(out.dtype.element_ty), mask=d < D)
