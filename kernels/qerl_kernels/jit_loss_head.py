"""Triton kernels of `loss_head`: one reads logits once for scores, one overwrites them with gradients."""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # replaces logits of -inf, so that 0 times it is 0
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_scores(
    logits,  # (rows, V)
    targets,  # (rows,)
    logprob,
    entropy,
    entropy_t1,
    likeliest,
    logsumexp,  # of logits / temperature; these five are (rows,) FP32
    vocabulary,
    stride,
    inverse_temperature,
    SCALED: tl.constexpr,  # the temperature is not 1
    BLOCK: tl.constexpr,
):
    """One row per program, with a running maximum. Each thread keeps its own sums until the end."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * stride
    target = tl.load(targets + row).to(tl.int32)
    wanted = tl.load(base + target).to(tl.float32)
    slope = inverse_temperature * LOG2_E
    highest = tl.maximum(wanted, LOWEST)
    total = tl.zeros((BLOCK,), tl.float32)  # sum of e^((x - highest) / temperature)
    moment = tl.zeros((BLOCK,), tl.float32)  # the same with every term times its logit x
    total_t1 = tl.zeros((BLOCK,), tl.float32)
    moment_t1 = tl.zeros((BLOCK,), tl.float32)
    beaten = 0
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(base + column, mask=column < vocabulary, other=LOWEST).to(tl.float32)
        x = tl.maximum(x, LOWEST)
        top = tl.max(x, 0)
        if (start <= target) & (target < start + BLOCK):
            beaten |= tl.max(((x > wanted) | ((x == wanted) & (column < target))).to(tl.int32), 0)
        else:
            beaten |= ((top > wanted) | ((top == wanted) & (start < target))).to(tl.int32)
        if top > highest:
            shrink = tl.exp2((highest - top) * slope)
            total *= shrink
            moment *= shrink
            if SCALED:
                shrink = tl.exp2((highest - top) * LOG2_E)
                total_t1 *= shrink
                moment_t1 *= shrink
            highest = top
        e = tl.exp2((x - highest) * slope)
        total += e
        moment += x * e
        if SCALED:
            e = tl.exp2((x - highest) * LOG2_E)
            total_t1 += e
            moment_t1 += x * e
    s, t = tl.sum(total, 0), tl.sum(moment, 0)
    log_s = tl.log(s)
    h = tl.maximum(log_s - (t / s - highest) * inverse_temperature, 0.0)
    tl.store(logprob + row, tl.minimum((wanted - highest) * inverse_temperature - log_s, 0.0))
    tl.store(entropy + row, h)
    tl.store(likeliest + row, 1.0 - beaten.to(tl.float32))
    tl.store(logsumexp + row, highest * inverse_temperature + log_s)
    if SCALED:
        s, t = tl.sum(total_t1, 0), tl.sum(moment_t1, 0)
        h = tl.maximum(tl.log(s) - (t / s - highest), 0.0)
    tl.store(entropy_t1 + row, h)


@triton.jit
def gradients(
    logits,  # (rows, V); overwritten with the gradient of the log-probability
    entropy_gradient,  # (rows, V) output if WITH_ENTROPY: the gradient of the entropy
    targets,
    logsumexp,
    entropy,
    vocabulary,
    stride,
    inverse_temperature,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, start = tl.program_id(0), tl.program_id(1) * BLOCK
    column = start + tl.arange(0, BLOCK)
    inside = column < vocabulary
    at = row.to(tl.int64) * stride + column
    x = tl.load(logits + at, mask=inside, other=-float("inf")).to(tl.float32)
    log_p = tl.maximum(x * inverse_temperature - tl.load(logsumexp + row), LOWEST)
    p = tl.exp(log_p)
    chosen = (column == tl.load(targets + row)).to(tl.float32)
    tl.store(logits + at, ((chosen - p) * inverse_temperature).to(logits.dtype.element_ty), mask=inside)
    if WITH_ENTROPY:
        slope = -p * (log_p + tl.load(entropy + row)) * inverse_temperature
        tl.store(entropy_gradient + at, slope.to(logits.dtype.element_ty), mask=inside)
