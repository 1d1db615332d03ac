"""Products of tokens, in the order of their experts, with a packed matrix for each expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from qerl_bench.quant.matrices import PackedMatrices

Groups = list[tuple[int, slice]]  # the experts that have tokens, and which rows of the sorted tokens are theirs


def groups_of(counts: list[int]) -> Groups:
    """The groups for the number of tokens of each expert."""
    groups, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            groups.append((expert, slice(start, start + count)))
        start += count
    return groups


def grouped_linear(
    x: torch.Tensor, weight: PackedMatrices, groups: Groups, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """y (S, N) = scale_e * (x @ W_e^T) + bias_e for tokens x (S, K) in the order of their experts; bias (E, N).

    Differentiable in x. Rows of no group are zero.
    """
    return _GroupedLinear.apply(x, weight, groups, bias)  # type: ignore[return-value]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: PackedMatrices, groups: Groups, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.weight, ctx.groups = weight, groups
        y = x.new_zeros(len(x), weight.out_features)
        for expert, rows in groups:
            operand, scale = weight.operand(expert, x.dtype), weight.scales[expert]
            start = x.new_empty(1) if bias is None else bias[expert].to(x.dtype)
            y[rows] = torch.addmm(start, x[rows], operand.t(), beta=int(bias is not None), alpha=scale)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (grad_y,) = grads
        weight: PackedMatrices = ctx.weight
        grad_x = grad_y.new_zeros(len(grad_y), weight.in_features)
        for expert, rows in ctx.groups:
            operand, scale = weight.operand(expert, grad_y.dtype), weight.scales[expert]
            grad_x[rows] = torch.addmm(grad_y.new_empty(1), grad_y[rows], operand, beta=0, alpha=scale)
        return grad_x, None, None, None


def grouped_lora(x: torch.Tensor, adapter: ExpertsAdapter, groups: Groups) -> torch.Tensor:
    """The adapter's output (S, N) for tokens x (S, K) in the order of their experts, in the dtype of x."""
    a, b = adapter.a.to(x.dtype), adapter.b.to(x.dtype)
    parts = [x[rows] @ a[expert].t() @ b[expert].t() * adapter.scaling for expert, rows in groups]
    covered = groups[-1][1].stop if groups else 0
    return torch.cat([*parts, x.new_zeros(len(x) - covered, b.shape[1])])


@dataclass(frozen=True)
class ExpertsAdapter:
    """LoRA on one parameter: `scaling` * (x A^T) B^T with the matrices of the token's expert."""

    a: torch.Tensor  # (E, r, K)
    b: torch.Tensor  # (E, N, r)
    scaling: float
