"""Triton kernel of `sampling`. One program draws the token of one row, so rows do not depend on each other."""

import triton
import triton.language as tl

from qerl_kernels.jit_overlap import wait_for_earlier

LOWEST = tl.constexpr(-1e30)  # replaces the difference to a logit of -inf, so that 0 times it is 0
NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def philox_uniform(key, position):
    """Number `position` of NumPy's Generator(Philox(key=key)).random: 53 bits of Philox-4x64-10, FP64."""
    c0 = (position // 4 + 1).to(tl.uint64)
    c1 = c0 * 0
    c2 = c1
    c3 = c1
    k0 = key.to(tl.uint64)
    k1 = c1
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2E7470EE14C6C93), c0 * 0xD2E7470EE14C6C93
        high1, low1 = tl.umulhi(c2, 0xCA5A826395121157), c2 * 0xCA5A826395121157
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B97F4A7C15
        k1 += 0xBB67AE8584CAA73B
    lane = position % 4
    word = tl.where(lane == 0, c0, tl.where(lane == 1, c1, tl.where(lane == 2, c2, c3)))
    return (word >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def sortable(x):
    """int32 in the same order as the FP32 `x`; both zeros give the same number."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def load_block(base, start, vocabulary, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    return column, tl.load(base + column, mask=column < vocabulary, other=-float("inf")).to(tl.float32)


@triton.jit
def top_k_threshold(base, vocabulary, highest, top_k, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """`sortable` of the `top_k`-th largest logit, by bisection over its bits."""
    low = tl.full((), -(2**31) >> SHIFT, tl.int32)  # at least top_k logits are this large
    high = sortable(highest) >> SHIFT
    while low < high:
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # rounded up, without overflow
        count = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, vocabulary, BLOCK):
            column, x = load_block(base, start, vocabulary, BLOCK)
            count += (((sortable(x) >> SHIFT) >= middle) & (column < vocabulary)).to(tl.int32)
        enough = tl.sum(count, 0) >= top_k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def mass_above(base, vocabulary, highest, inverse_temperature, least, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of e^((x - highest) / temperature) over logits x with `sortable` of at least `least`, FP64."""
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        _column, x = load_block(base, start, vocabulary, BLOCK)
        e = tl.exp((x - highest) * inverse_temperature)
        mass += tl.where((sortable(x) >> SHIFT) >= least, e, 0.0)
    return tl.sum(mass.to(tl.float64), 0)


@triton.jit
def top_p_threshold(
    base, vocabulary, highest, inverse_temperature, top_p, least, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """`sortable` of the smallest logit in the nucleus: the largest bound that keeps `top_p` of the mass above `least`.

    The search starts at logits so small that even V of them hold less than the rest, 1 - `top_p`.
    """
    total = mass_above(base, vocabulary, highest, inverse_temperature, least, SHIFT, BLOCK)
    wanted = total * top_p
    rest = tl.maximum((total - wanted) * 0.99 / vocabulary, 1e-30).to(tl.float32)
    negligible = highest + tl.log(rest) / inverse_temperature
    low, high = tl.maximum(least, sortable(negligible) >> SHIFT), sortable(highest) >> SHIFT
    while low < high:
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        enough = mass_above(base, vocabulary, highest, inverse_temperature, middle, SHIFT, BLOCK) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit(do_not_specialize=["position", "top_k"])
def draw(
    logits,  # (B, V)
    keys,  # (B,) int64
    tokens,  # (B,) int64
    logprobs,
    entropies,  # both (B,) FP32
    position,
    vocabulary,
    stride,
    inverse_temperature,
    top_k,
    top_p,
    GREEDY: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    SHIFT: tl.constexpr,  # low bits that no logit has: 16 for bfloat16
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # a power of two, at least V / BLOCK
    ON_DEVICE: tl.constexpr,  # the position of each row is read from memory
    PDL: tl.constexpr,
):
    wait_for_earlier(PDL)
    row = tl.program_id(0)
    place = tl.load(position + row) if ON_DEVICE else position
    base = logits + row.to(tl.int64) * stride
    maxima = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        _column, x = load_block(base, start, vocabulary, BLOCK)
        maxima = tl.maximum(maxima, x)
    highest = tl.max(maxima, 0)
    least = tl.full((), -(2**31) >> SHIFT, tl.int32)
    if TOP_K:
        least = top_k_threshold(base, vocabulary, highest, top_k, SHIFT, BLOCK)
    if TOP_P:
        least = top_p_threshold(base, vocabulary, highest, inverse_temperature, top_p, least, SHIFT, BLOCK)

    block = tl.arange(0, BLOCKS)
    masses = tl.zeros((BLOCKS,), tl.float64)  # of the allowed tokens in each block
    total = tl.zeros((BLOCK,), tl.float32)  # of all tokens, as `moment`; NaN if a logit is NaN or plus infinity
    moment = tl.zeros((BLOCK,), tl.float32)
    first = tl.full((BLOCK,), NOWHERE, tl.int32)
    for start in range(0, vocabulary, BLOCK):
        column, x = load_block(base, start, vocabulary, BLOCK)
        z = tl.maximum((x - highest) * inverse_temperature, LOWEST, propagate_nan=tl.PropagateNan.ALL)
        e = tl.exp(z)
        total += e
        moment += z * e
        if GREEDY:
            first = tl.minimum(first, tl.where(x == highest, column, NOWHERE))
        else:
            allowed = tl.where((sortable(x) >> SHIFT) >= least, e, 0.0)
            masses = tl.where(block == start // BLOCK, tl.sum(allowed.to(tl.float64), 0), masses)
    s, t = tl.sum(total, 0), tl.sum(moment, 0)
    log_s = tl.log(s)

    if GREEDY:
        token = tl.min(first, 0)
    else:
        sums = tl.cumsum(masses, 0)
        wanted = philox_uniform(tl.load(keys + row), place) * tl.max(sums, 0)
        chosen = tl.min(tl.where(sums > wanted, block, BLOCKS - 1), 0)
        before = tl.sum(tl.where(block == chosen, sums - masses, 0.0), 0)
        column, x = load_block(base, chosen * BLOCK, vocabulary, BLOCK)
        e = tl.exp(tl.maximum((x - highest) * inverse_temperature, LOWEST))
        e = tl.where((sortable(x) >> SHIFT) >= least, e, 0.0).to(tl.float64)
        beyond = tl.cumsum(e, 0) + before > wanted
        token = tl.min(tl.where(beyond & (e > 0), column, NOWHERE), 0)
        last = tl.max(tl.where(e > 0, column, -1), 0)  # if the two sums of a block are rounded differently
        token = tl.where(token == NOWHERE, last, token)
    token = tl.minimum(tl.maximum(token, 0), vocabulary - 1)  # any valid token in a row with NaN
    tl.store(tokens + row, token.to(tl.int64))
    picked = tl.load(base + token).to(tl.float32)
    tl.store(logprobs + row, (picked - highest) * inverse_temperature - log_s)
    tl.store(entropies + row, tl.maximum(log_s - t / s, 0.0, propagate_nan=tl.PropagateNan.ALL))
