"""Triton kernels of `training_block`. Forward they round where the plain modules do; gradients are rounded once."""

import triton
import triton.language as tl


@triton.jit
def norm_gradient(total, weight, grad_normed, grad_total, out, width, epsilon, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """One row of the gradient of x (n, H), for normed = x / rms(x) * weight, plus `grad_total`."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(total + row + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad_normed + row + column, mask=inside, other=0.0).to(tl.float32) * w
    inverse = tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
    grad = inverse * (g - x * (inverse * inverse * tl.sum(g * x, 0) / width))
    if ADD:
        grad += tl.load(grad_total + row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, grad.to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_gradient(gate_up, grad_out, out, width, BLOCK: tl.constexpr):
    """A part of one row of the gradient of gate_up (n, 2 * width), for silu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row * 2 * width + column
    gate = tl.load(gate_up + at, mask=inside, other=0.0)
    up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_out + row * width + column, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-wide))
    activated = (wide * share).to(gate.dtype).to(tl.float32)
    grad_gate = grad * up * share * (1.0 + wide * (1.0 - share))
    tl.store(out + at, grad_gate.to(gate.dtype), mask=inside)
    tl.store(out + at + width, (grad * activated).to(gate.dtype), mask=inside)


@triton.jit
def load_halves(x, inside, D: tl.constexpr):
    """The two halves of heads, each (tokens, D / 2), in the type in which they are stored."""
    return tl.load(x, mask=inside, other=0.0), tl.load(x + D // 2, mask=inside, other=0.0)


@triton.jit
def load_wide(x, inside, D: tl.constexpr):
    """The same in FP32."""
    low, high = load_halves(x, inside, D)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def rotate_head(source, target, cos, sin, scale, half, inside, epsilon, D: tl.constexpr, NORM: tl.constexpr):
    """Norm and rotation of one head of some tokens, rounded after each operation."""
    x, y = load_halves(source, inside, D)
    dtype = x.dtype
    a, b = x.to(tl.float32), y.to(tl.float32)
    if NORM:
        inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + epsilon)[:, None]
        w_low, w_high = load_wide(scale + half, half < D // 2, D)
        a = ((a * inverse).to(dtype).to(tl.float32) * w_low).to(dtype).to(tl.float32)
        b = ((b * inverse).to(dtype).to(tl.float32) * w_high).to(dtype).to(tl.float32)
    cos_low, cos_high = load_wide(cos, inside, D)  # for each head again, from the cache: registers are scarcer
    sin_low, sin_high = load_wide(sin, inside, D)
    low = (a * cos_low).to(dtype).to(tl.float32) - (b * sin_low).to(dtype).to(tl.float32)
    high = (b * cos_high).to(dtype).to(tl.float32) + (a * sin_high).to(dtype).to(tl.float32)
    tl.store(target, low.to(dtype), mask=inside)
    tl.store(target + D // 2, high.to(dtype), mask=inside)


@triton.jit
def rotate(
    qkv, cos, sin, q_scale, k_scale, q, k, v, rows, epsilon,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr,
    PER_PROGRAM: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Some heads of some tokens of qkv (n, HEADS + 2 * KV, D): rotated queries and keys, and values as they are."""
    first = (tl.program_id(0) * TOKENS).to(tl.int64)  # token; offsets from there are 32 bits
    row = tl.arange(0, TOKENS)[:, None]
    half = tl.arange(0, HALF)[None, :]
    inside = (first + row < rows) & (half < D // 2)
    angle = row * D + half
    cos, sin = cos + first * D, sin + first * D
    q, k, v = q + first * HEADS * D, k + first * KV * D, v + first * KV * D
    qkv += first * (HEADS + 2 * KV) * D
    for i in range(PER_PROGRAM):
        head = tl.program_id(1) * PER_PROGRAM + i
        source = qkv + (row * (HEADS + 2 * KV) + head) * D + half
        if head < HEADS:
            target = q + (row * HEADS + head) * D + half
            rotate_head(source, target, cos + angle, sin + angle, q_scale, half, inside, epsilon, D, NORM)
        elif head < HEADS + KV:
            target = k + (row * KV + head - HEADS) * D + half
            rotate_head(source, target, cos + angle, sin + angle, k_scale, half, inside, epsilon, D, NORM)
        elif head < HEADS + 2 * KV:
            target = v + (row * KV + head - HEADS - KV) * D + half
            x, y = load_halves(source, inside, D)
            tl.store(target, x, mask=inside)
            tl.store(target + D // 2, y, mask=inside)


@triton.jit
def rotate_head_back(
    grad, source, target, cos, sin, scale, half, inside, epsilon, D: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """The gradient of one head of some tokens before norm and rotation; `source` is that head, read with NORM only."""
    low, high = load_halves(grad, inside, D)
    dtype = low.dtype
    g, h = low.to(tl.float32), high.to(tl.float32)
    cos_low, cos_high = load_wide(cos, inside, D)
    sin_low, sin_high = load_wide(sin, inside, D)
    a = g * cos_low + h * sin_high
    b = h * cos_high - g * sin_low
    if NORM:
        x, y = load_wide(source, inside, D)
        w_low, w_high = load_wide(scale + half, half < D // 2, D)
        a, b = a * w_low, b * w_high
        inverse = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + epsilon)[:, None]
        along = inverse * inverse * (tl.sum(a * x, 1) + tl.sum(b * y, 1))[:, None] / D
        a, b = inverse * (a - x * along), inverse * (b - y * along)
    tl.store(target, a.to(dtype), mask=inside)
    tl.store(target + D // 2, b.to(dtype), mask=inside)


@triton.jit
def rotate_back(
    qkv, cos, sin, q_scale, k_scale, q, k, v, rows, epsilon, out,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr,
    PER_PROGRAM: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The gradient `out` of qkv from those of q, k and v."""
    first = (tl.program_id(0) * TOKENS).to(tl.int64)  # token; offsets from there are 32 bits
    row = tl.arange(0, TOKENS)[:, None]
    half = tl.arange(0, HALF)[None, :]
    inside = (first + row < rows) & (half < D // 2)
    angle = row * D + half
    cos, sin = cos + first * D, sin + first * D
    q, k, v = q + first * HEADS * D, k + first * KV * D, v + first * KV * D
    qkv, out = qkv + first * (HEADS + 2 * KV) * D, out + first * (HEADS + 2 * KV) * D
    for i in range(PER_PROGRAM):
        head = tl.program_id(1) * PER_PROGRAM + i
        at = (row * (HEADS + 2 * KV) + head) * D + half
        if head < HEADS:
            grad = q + (row * HEADS + head) * D + half
            rotate_head_back(
                grad, qkv + at, out + at, cos + angle, sin + angle, q_scale, half, inside, epsilon, D, NORM
            )
        elif head < HEADS + KV:
            grad = k + (row * KV + head - HEADS) * D + half
            rotate_head_back(
                grad, qkv + at, out + at, cos + angle, sin + angle, k_scale, half, inside, epsilon, D, NORM
            )
        elif head < HEADS + 2 * KV:
            x, y = load_halves(v + (row * KV + head - HEADS - KV) * D + half, inside, D)
            tl.store(out + at, x, mask=inside)
            tl.store(out + at + D // 2, y, mask=inside)
