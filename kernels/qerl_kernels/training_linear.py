"""A frozen packed linear layer with a trained adapter: forward, input gradient, and the adapter's gradients.

The weight is decoded for each of the two large matmuls and dropped again, so training keeps no 16-bit copy. If
`operand` writes to a shared buffer, this costs memory traffic of 2.6 bytes per weight. The matmuls are the library's.
They apply the tensor scale in FP32 before their only rounding, as in sampling. Left out: gradients of weight and bias,
which are frozen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from qerl_kernels import projection

RowScales = Sequence[tuple[slice, float]]
Kept = deque[tuple[torch.Tensor, int]]  # outputs, with their versions, by which a change in place shows
_kept: ContextVar[tuple[Kept | None, bool]] = ContextVar("kept", default=(None, False))


@dataclass(frozen=True)
class Adapter:
    """LoRA: `scaling` * (x A^T) B^T, computed in the dtype of x. A and B get gradients."""

    a: torch.Tensor  # (r, K)
    b: torch.Tensor  # (N, r)
    scaling: float
    parts: tuple[int, ...] = ()  # if it is of joined layers, their rows: B is block diagonal, with blocks of one width


JoinedAdapters = Sequence[tuple[slice, Adapter]]  # of layers that are one matmul: each adds to its range of rows


def packed_linear(
    x: torch.Tensor,
    operand: Callable[[torch.dtype], torch.Tensor],
    row_scales: RowScales,
    bias: torch.Tensor | None,
    adapter: Adapter | JoinedAdapters | None = None,
    multiply: Callable[[torch.Tensor], torch.Tensor] | None = None,
    gradient: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """y (..., N) = scale * (x @ operand^T) + bias + the adapter's output; x is (..., K).

    `multiply` takes the place of all but the adapter, from x (M, K) to (M, N); its gradient is that of what it
    replaces, and `operand` is then called in the backward pass alone. `gradient` takes the place of the backward
    matmul with `operand`, from the gradient of y (M, N) to that of x (M, K), without the adapter's part.

    `operand(dtype)` returns the matrix (N, K) without its tensor scale. It is called in the forward and in the backward
    pass, and each call may overwrite the result of the last. `row_scales` has the tensor scale of each range of rows.
    Raises ValueError if the adapter does not fit.
    """
    rows = x.reshape(-1, x.shape[-1])  # (M, K); reshaped out here, since a view made inside cannot be changed in place
    joined = [(slice(None), adapter)] if isinstance(adapter, Adapter) else list(adapter or ())
    for part, one in joined:
        outputs = one.b.shape[0] if part.stop is None else part.stop - part.start
        if one.a.shape[1] != x.shape[-1] or one.b.shape != (outputs, len(one.a)):
            raise ValueError(
                f"the adapter must be (r, {x.shape[-1]}) and ({outputs}, r), got {tuple(one.a.shape)} and "
                f"{tuple(one.b.shape)}; was it made for another layer?"
            )
    parts = [(part, one.scaling) for part, one in joined]
    matrices = [one.a for _, one in joined] + [one.b for _, one in joined]
    y = _PackedLinear.apply(rows, operand, row_scales, bias, multiply, gradient, parts, *matrices)
    return y.view(*x.shape[:-1], y.shape[1])


def down(x: torch.Tensor, a: torch.Tensor, beside: bool = False) -> torch.Tensor:
    """x A^T (M, r) of x (M, K) and A (r, K) in one dtype, without gradient; `beside` is for `projection.project`."""
    return projection.project(x, a, beside) if beside or projection.pays(x, a) else x @ a.t()


def plus_adapter(y: torch.Tensor, x: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    """y (..., N), without gradient, plus the output of `adapter` for x (..., K), written to y."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    a, b = adapter.a.to(x.dtype), adapter.b.to(x.dtype)
    through = down(rows, a) if x.device.type == "cuda" else rows @ a.t()
    y.view(-1, y.shape[-1]).addmm_(through, b.t(), alpha=adapter.scaling)
    return y


@contextmanager
def keeping(outputs: Kept) -> Iterator[None]:
    """Context in which the output of every `packed_linear` is appended to `outputs`."""
    with _keep(outputs, reuse=False):
        yield


@contextmanager
def reusing(outputs: Kept) -> Iterator[None]:
    """Context that repeats what was computed in `keeping(outputs)`: outputs are taken from there, not computed."""
    try:
        with _keep(outputs, reuse=True):
            yield
    finally:
        outputs.clear()


@contextmanager
def _keep(outputs: Kept, *, reuse: bool) -> Iterator[None]:
    token = _kept.set((outputs, reuse))
    try:
        yield
    finally:
        _kept.reset(token)


def _matmul(rows: torch.Tensor, weight: torch.Tensor, row_scales: RowScales, bias: torch.Tensor | None) -> torch.Tensor:
    """(M, K) x (N, K)^T, each range of rows of `weight` times its scale, plus `bias`."""
    parts = []
    for part, scale in row_scales:
        if bias is None:
            y = torch.addmm(rows.new_empty(1), rows, weight[part].t(), beta=0, alpha=scale)
        else:
            y = torch.addmm(bias[part].to(rows.dtype), rows, weight[part].t(), alpha=scale)
        parts.append(y)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        operand: Callable[[torch.dtype], torch.Tensor],
        row_scales: RowScales,
        bias: torch.Tensor | None,
        multiply: Callable[[torch.Tensor], torch.Tensor] | None,
        gradient: Callable[[torch.Tensor], torch.Tensor] | None,
        parts: Sequence[tuple[slice, float]],
        *matrices: torch.Tensor,
    ) -> torch.Tensor:
        ctx.operand, ctx.row_scales, ctx.parts, ctx.gradient = operand, row_scales, parts, gradient
        outputs, reuse = _kept.get()
        a, b = matrices[: len(parts)], matrices[len(parts) :]
        down = rows @ _stacked(a, rows.dtype).t() if parts else None  # (M, sum of r)
        if outputs is not None and reuse:
            y, version = outputs.popleft()
            if y._version != version:
                raise RuntimeError("a kept output was changed in place, so it cannot be reused")
        else:
            y = multiply(rows) if multiply else _matmul(rows, operand(rows.dtype), row_scales, bias)
            for (part, scaling), up, through in zip(parts, b, _columns(down, a), strict=True):
                y[:, part].addmm_(through, up.to(rows.dtype).t(), alpha=scaling)
            if outputs is not None:
                outputs.append((y.detach(), y._version))
        ctx.save_for_backward(*(() if down is None else (rows, down, *matrices)))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (rows_y,) = grads  # (M, N)
        grad_x = None
        if ctx.needs_input_grad[0] and ctx.gradient is not None:
            grad_x = ctx.gradient(rows_y)
        elif ctx.needs_input_grad[0]:
            weight = ctx.operand(rows_y.dtype)  # (N, K)
            grad_x = rows_y.new_empty(1)
            for i, (part, scale) in enumerate(ctx.row_scales):
                grad_x = torch.addmm(grad_x, rows_y[:, part], weight[part], beta=int(i > 0), alpha=scale)
        saved = ctx.saved_tensors  # read once: under gradient checkpointing only the first read recomputes them
        if not saved:
            return grad_x, *(None,) * 6
        rows, down, *matrices = saved
        a, b = matrices[: len(ctx.parts)], matrices[len(ctx.parts) :]
        outputs = [(rows_y[:, part], scaling) for part, scaling in ctx.parts]
        grad_down = [(y @ up.to(y.dtype)).mul_(scaling) for (y, scaling), up in zip(outputs, b, strict=True)]
        all_down = grad_down[0] if len(grad_down) == 1 else torch.cat(grad_down, dim=1)  # (M, sum of r)
        if grad_x is not None:
            grad_x.addmm_(all_down, _stacked(a, rows_y.dtype))
        grad_a = _product(all_down.t(), rows, a[0].dtype).split([len(one) for one in a])
        grad_b = [
            _product(y.t(), through, up.dtype).mul_(scaling)
            for (y, scaling), through, up in zip(outputs, _columns(down, a), b, strict=True)
        ]
        return grad_x, *(None,) * 6, *grad_a, *grad_b


def _stacked(matrices: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The matrices A (r, K) of all adapters as one, so that one matmul reads x for all of them."""
    return matrices[0].to(dtype) if len(matrices) == 1 else torch.cat([one.to(dtype) for one in matrices])


def _columns(down: torch.Tensor | None, a: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The part of `down` (M, sum of r) that belongs to each adapter."""
    return () if down is None else down.split([len(one) for one in a], dim=1)


def _product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`left` @ `right` in `dtype`, on a GPU without rounding to 16 bits on the way."""
    if left.device.type == "cuda" and dtype == torch.float32 and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)
