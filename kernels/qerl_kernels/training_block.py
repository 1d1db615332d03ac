"""What a training pass does between the matmuls of a dense block, one kernel forward and one backward for each.

Written out by autograd, norms, rotation and SwiGLU read and write the activations many times in steps of their own,
some of them in FP32. Here each reads its inputs once, computes in FP32 and writes its result once. Statistics and
activations are computed again in the backward pass, so nothing is saved but inputs that the pass holds anyway.
`training_block_reference` has the same functions in plain PyTorch. Left out: gradients of the norms' scales, which are
frozen while an adapter trains, and norms that multiply by 1 + weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qerl_kernels import decoder_layer
from qerl_kernels.checks import require_device, require_shape
from qerl_kernels.decoder_layer import FLOATS, power_of_2

NORM_WARPS = 8
GATED = (1024, 4)  # columns of a program, and its warps
ROTATED = (8, 6, 4)  # tokens and heads of a program, and its warps; with more tokens it spills on an A100


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum x + delta (n, H) and its RMSNorm with `weight` (H,), which may have a higher precision than x.

    Without delta the sum is x itself, whose two gradients are then added by the kernel. Raises ValueError if `weight`
    requires a gradient.
    """
    _require_frozen(weight)
    return _AddNorm.apply(x, delta, weight, epsilon)


def rotate(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int],
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries (n, H, D) and keys (n, KV, D), and values (n, KV, D), from qkv (n, (H + 2 * KV) * D).

    `heads` is (H, KV). `cos` and `sin` (n, D) are those of each token; the two halves of a head are rotated against
    each other, as in Llama. With `norms`, scales (D,) of queries and keys, each head goes through RMSNorm first, as in
    Qwen3. Raises ValueError if a scale requires a gradient.
    """
    for scale in norms or ():
        _require_frozen(scale)
    return _Rotate.apply(qkv, cos, sin, heads, norms, epsilon)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (n, I) of gate_up (n, 2 * I), the gates first."""
    return _SwiGLU.apply(gate_up)


def _require_frozen(scale: torch.Tensor) -> None:
    if scale.requires_grad:
        raise ValueError("the scale of a norm must be frozen, its gradient is not computed; use the reference")


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, normed = decoder_layer.add_norm(x, delta, weight, epsilon)
        ctx.save_for_backward(total, weight)
        ctx.epsilon = epsilon
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        grad_total, grad_normed = grads
        total, weight = ctx.saved_tensors
        grad = grad_total
        if grad_normed is not None:
            grad = _norm_gradient(total, weight, grad_normed, grad_total, ctx.epsilon)
        return grad, grad if ctx.needs_input_grad[1] else None, None, None


def _norm_gradient(
    total: torch.Tensor, weight: torch.Tensor, normed: torch.Tensor, more: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """The gradient of `total` (n, H) through its norm, from that of the normed, plus `more`."""
    from qerl_kernels import jit_training_block

    rows, width = total.shape
    out = torch.empty_like(total)
    kernel: Any = jit_training_block.norm_gradient
    kernel[(rows,)](
        total, weight, normed.contiguous(), None if more is None else more.contiguous(), out, width, epsilon,
        ADD=more is not None, BLOCK=power_of_2(width), num_warps=NORM_WARPS,
    )  # fmt: skip
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads: tuple[int, int],
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        epsilon: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        (rows, size), (of_queries, of_keys) = cos.shape, heads
        require_shape("cos", cos, (rows, size), *FLOATS)
        require_shape("sin", sin, (rows, size), cos.dtype)
        require_shape("qkv", qkv, (rows, (of_queries + 2 * of_keys) * size), *FLOATS)
        for scale in norms or ():
            require_shape("norms", scale, (size,), *FLOATS)
        if size % 2:
            raise ValueError(f"the head size must be even, got {size}; pad it")
        require_device(qkv=qkv, cos=cos, sin=sin)
        from qerl_kernels import jit_training_block

        out = [qkv.new_empty(rows, count, size) for count in (of_queries, of_keys, of_keys)]
        ctx.heads, ctx.epsilon = heads, epsilon
        ctx.save_for_backward(cos, sin, *((qkv, *norms) if norms is not None else ()))
        _launch_rotation(jit_training_block.rotate, qkv, cos, sin, norms, out, heads, epsilon)
        return out[0], out[1], out[2]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        from qerl_kernels import jit_training_block

        cos, sin, *others = ctx.saved_tensors
        parts = [grad.contiguous() for grad in grads]
        out = parts[0].new_empty(len(cos), sum(part.shape[1] for part in parts) * cos.shape[1])
        qkv, norms = (others[0], others[1:]) if others else (out, None)  # without norms qkv is not read
        _launch_rotation(jit_training_block.rotate_back, qkv, cos, sin, norms, parts, ctx.heads, ctx.epsilon, out)
        return out, *(None,) * 5


def _launch_rotation(
    kernel: Any,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: Sequence[torch.Tensor] | None,
    parts: Sequence[torch.Tensor],
    heads: tuple[int, int],
    epsilon: float,
    *out: torch.Tensor,
) -> None:
    (rows, size), (of_queries, of_keys) = cos.shape, heads
    tokens, per_program, warps = ROTATED
    kernel[(-(-rows // tokens), -(-(of_queries + 2 * of_keys) // per_program))](
        qkv, cos, sin, *(norms or (None, None)), *parts, rows, epsilon, *out,
        HEADS=of_queries, KV=of_keys, D=size, HALF=power_of_2(size // 2), TOKENS=tokens, PER_PROGRAM=per_program,
        NORM=norms is not None, num_warps=warps,
    )  # fmt: skip


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return decoder_layer.swiglu(*gate_up.chunk(2, dim=-1))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        from qerl_kernels import jit_training_block

        (gate_up,) = ctx.saved_tensors
        out = torch.empty_like(gate_up)
        rows, width = grads[0].shape
        block, warps = GATED
        kernel: Any = jit_training_block.swiglu_gradient
        grid = (rows, -(-width // block))
        kernel[grid](gate_up, grads[0].contiguous(), out, width, BLOCK=block, num_warps=warps)
        return out
