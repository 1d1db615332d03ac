"""Experts over packed weights: what `quant.linear` is for a linear layer, for the experts of a mixture (MoE).

transformers keeps the experts of a block in one module, as parameters of three dimensions. `pack_experts` puts a
`PackedMatrices` in the place of each and lets `PackedExperts` run the module: tokens are sorted by expert, every
expert that has tokens multiplies its own, and its weight is rebuilt for that matmul, in the forward and in the
backward pass. The rest of the module, its activation above all, stays the model's own. Which modules can be packed is
read off their parameters and their `forward`: those under transformers' experts interface, and Llama 4's. For a few
tokens on a GPU the grouped kernel reads the packed weights of the chosen experts directly, and nothing waits for the
host. Left out: other modules with such parameters (JetMoE, Step), which stay as they are and count against
`packed_share`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from qerl_bench.quant.base import BlockFormat
from qerl_bench.quant.linear import KERNEL_BUFFERS, TENSOR_SCALES, keep_packed_dtypes, resident_kernel_weight
from qerl_kernels import grouped, layout
from qerl_kernels.dequantize import dequantize

_PARAMETERS = ({"gate_up_proj", "down_proj"}, {"up_proj", "down_proj"})
_MAX_WEIGHTS = 2**28  # rebuilt at one time: 1 GiB in FP32, and a few times that on the way
Groups = list[tuple[int, slice]]  # the experts that have tokens, and which rows of the sorted tokens are theirs


class PackedMatrices(torch.nn.Module):
    """One parameter of an experts module: E frozen matrices W (N, K), packed; each has a tensor scale of its own.

    Buffers have the names of the format's checkpoints and one more axis in front, (E, ...). `transposed` tells that the
    model's parameter was (E, K, N).
    """

    _scale_offset: int | None = None  # `KernelWeight.offset`, set once the kernels' layout is the resident one
    kernel_scale: torch.Tensor | None = None  # the tensor scales for the kernels, FP32 (E,); None without any

    def __init__(
        self,
        weight_format: BlockFormat,
        packed: Mapping[str, torch.Tensor],
        shape: tuple[int, int, int],
        transposed: bool,
    ) -> None:
        super().__init__()
        self.weight_format, self.transposed = weight_format, transposed
        self.experts, self.out_features, self.in_features = shape
        self._buffers.update(packed)
        self._read_scales()

    @property
    def device(self) -> torch.device:
        return next(self.buffers()).device

    @property
    def kernel_weight(self) -> layout.KernelWeight | None:
        """The matrix (E * N, K) of all experts as the fused kernels read it, after `use_kernels`."""
        shape = (self.experts * self.out_features, self.in_features)
        return resident_kernel_weight(self, self.weight_format, shape, self._scale_offset)

    def use_kernels(self) -> None:
        """Replace the packed tensors by the layout of the fused kernels, without loss.

        Raises ValueError if the layout cannot hold them, or not every expert in tiles of its own.
        """
        if self._scale_offset is not None:
            return
        if self.weight_format.kernel_layout is None or self.out_features % layout.ROWS:
            raise ValueError(f"the fused kernels have no layout for {self.weight_format} and {self.out_features} rows")
        tensors = {name: tensor for name, tensor in self.named_buffers() if name not in TENSOR_SCALES}
        rows = {name: tensor.flatten(0, 1) for name, tensor in tensors.items()}
        repacked = layout.repack(
            self.weight_format.kernel_layout, rows, (self.experts * self.out_features, self.in_features)
        )
        for name in tensors:
            del self._buffers[name]
        self._buffers.update(zip(KERNEL_BUFFERS, (repacked.words, repacked.scales), strict=True))
        self._scale_offset = repacked.offset
        if any(name in self._buffers for name in TENSOR_SCALES):
            self.kernel_scale = torch.tensor(self.scales, device=self.device)

    def packed(self, expert: int) -> dict[str, torch.Tensor]:
        """The packed tensors of one expert by their checkpoint names."""
        resident = {name: tensor[expert] for name, tensor in self.named_buffers() if name not in KERNEL_BUFFERS}
        weight = self._kernel_weight_of(expert)
        return resident if weight is None else layout.unpack(weight) | resident

    def operand(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """The matmul operand (N, K) of one expert, without its tensor scale; the next call may overwrite it."""
        weight = self._kernel_weight_of(expert)
        if weight is not None and dtype == torch.bfloat16:
            return dequantize(weight)
        return self.weight_format.operand(self.packed(expert), (self.out_features, self.in_features), dtype)

    def dequantized(self, expert: int) -> torch.Tensor:
        """The weight (N, K) that one expert multiplies by, in FP32."""
        return self.operand(expert, torch.float32).mul_(self.scales[expert])

    def parameter(self, dtype: torch.dtype) -> torch.Tensor:
        """What the model's parameter would be: `dequantized` of all experts at once, rounded to `dtype`."""
        if self._scale_offset is None:
            stacked = torch.stack([self.dequantized(expert).to(dtype) for expert in range(self.experts)])
        else:  # a GPU would wait for the host if each expert had its own calls
            step = max(1, _MAX_WEIGHTS // (self.out_features * self.in_features))
            parts = [self._rebuilt(first, min(step, self.experts - first)) for first in range(0, self.experts, step)]
            stacked = torch.cat([part.to(dtype) for part in parts])
        return stacked.transpose(1, 2) if self.transposed else stacked

    def _rebuilt(self, first: int, count: int) -> torch.Tensor:
        """`dequantized` of `count` experts from `first` on, (count, N, K), from the layout of the kernels."""
        weight = self._kernel_weight_of(first, count)
        assert weight is not None
        rows = self.weight_format.operand(layout.unpack(weight), weight.shape, torch.float32)
        scales = rows.new_tensor(self.scales[first : first + count])
        return rows.view(count, self.out_features, self.in_features).mul_(scales[:, None, None])

    def _kernel_weight_of(self, expert: int, count: int = 1) -> layout.KernelWeight | None:
        """The matrix (count * N, K) of `count` experts from `expert` on."""
        whole = self.kernel_weight
        if whole is None:
            return None
        tiles = self.out_features // layout.ROWS
        part, shape = slice(expert * tiles, (expert + count) * tiles), (count * self.out_features, self.in_features)
        return layout.KernelWeight(whole.format, shape, whole.words[part], whole.scales[part], whole.offset)

    def _read_scales(self) -> None:
        tensors = {name: tensor for name, tensor in self.named_buffers() if name in TENSOR_SCALES}
        if not tensors:
            self.scales = [1.0] * self.experts
            return
        of_expert = [{name: t[expert] for name, t in tensors.items()} for expert in range(self.experts)]
        self.scales = [self.weight_format.output_scale(one) for one in of_expert]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedMatrices:
        with keep_packed_dtypes(self):
            super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._read_scales()

    def extra_repr(self) -> str:
        shape = f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{shape}, format={self.weight_format.name}"


@dataclass(frozen=True)
class ExpertsAdapter:
    """LoRA on one parameter: `scaling` * (x A^T) B^T with the matrices of the token's expert."""

    a: torch.Tensor  # (E, r, K)
    b: torch.Tensor  # (E, N, r)
    scaling: float


class PackedExperts(torch.nn.Module):
    """An experts module whose parameters are packed; a base class of the class that `pack_experts` gives the module."""

    num_experts: int
    adapters: Mapping[str, ExpertsAdapter] = MappingProxyType({})  # in use now, by parameter

    def matrices(self) -> dict[str, PackedMatrices]:
        """The packed parameters by name."""
        return {name: child for name, child in self.named_children() if isinstance(child, PackedMatrices)}

    @property
    def can_be_captured(self) -> bool:
        """Whether a batch of a few tokens runs without a word from the GPU to the host, as a CUDA graph needs it."""
        return self._runs_grouped(1, torch.bfloat16)

    def _runs_grouped(self, tokens: int, dtype: torch.dtype) -> bool:
        weights = [matrices.kernel_weight for matrices in self.matrices().values()]
        return all(w is not None and grouped.supported(w, self.num_experts, tokens, dtype) for w in weights)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor | None = None,
        top_k_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x (M, H), the experts (M, k) of each token and their weights (M, k) to (M, H).

        Llama 4 gives no routing: its x (E * M, H) holds all tokens for each expert, with the weights in them.
        """
        if top_k_index is None or top_k_weights is None:
            x = hidden_states.reshape(-1, hidden_states.shape[-1])
            return self._mlp(x, groups_of([len(x) // self.num_experts] * self.num_experts))
        tokens, chosen = top_k_index.shape
        if not torch.is_grad_enabled() and self._runs_grouped(tokens, hidden_states.dtype):
            rows = grouped.sort_rows(top_k_index, self.num_experts)
            y = self._mlp(hidden_states.index_select(0, rows.tokens), rows).index_select(0, rows.places)
            y = (y * top_k_weights.reshape(-1, 1)).view(tokens, chosen, -1)
            return y.sum(1).to(hidden_states.dtype)
        experts, order = top_k_index.reshape(-1).sort(stable=True)  # (M k,)
        # an index past the last expert means "none" and sorts behind all of them
        counts = torch.bincount(experts, minlength=self.num_experts)[: self.num_experts]
        y = self._mlp(hidden_states[order // chosen], groups_of(counts.tolist()))
        y = y * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        restored = torch.empty_like(order)
        restored[order] = torch.arange(len(order), device=order.device)
        return y[restored].view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)

    def _mlp(self, x: torch.Tensor, rows: Groups | grouped.SortedRows) -> torch.Tensor:
        """The experts' output (S, H) for the tokens x (S, H) in the order of their experts."""
        up = self._linear(x, "gate_up_proj" if "gate_up_proj" in self._modules else "up_proj", rows)
        return self._linear(self._activation(up), "down_proj", rows)

    def _activation(self, up: torch.Tensor) -> torch.Tensor:
        if "gate_up_proj" not in self._modules:
            return self.act_fn(up)  # type: ignore[operator]  # of the model's class
        if hasattr(self, "_apply_gate"):
            return self._apply_gate(up)  # type: ignore[operator]
        gate, up = up.chunk(2, dim=-1)
        return self.act_fn(gate) * up  # type: ignore[operator]

    def _linear(self, x: torch.Tensor, name: str, rows: Groups | grouped.SortedRows) -> torch.Tensor:
        matrices, bias = self.matrices()[name], getattr(self, f"{name}_bias", None)
        adapter = self.adapters.get(name)
        if not isinstance(rows, grouped.SortedRows):
            y = grouped_linear(x, matrices, rows, bias)
            return y if adapter is None else y + grouped_lora(x, adapter, rows)
        weight = matrices.kernel_weight
        assert weight is not None
        y = grouped.grouped_gemm(x, weight, rows, matrices.kernel_scale, bias)
        if adapter is None:
            return y
        down = grouped.grouped_gemm(x, adapter.a.to(x.dtype), rows)  # (S, r)
        return y.add_(grouped.grouped_gemm(down, adapter.b.to(x.dtype), rows), alpha=adapter.scaling)


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


def expert_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The 3-D parameters of an experts module that `pack_experts` can run, by name; empty for any other module."""
    owned = {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and parameter.is_floating_point()
    }
    arguments = len(inspect.signature(module.forward).parameters) if owned else 0
    known = owned.keys() in _PARAMETERS and (arguments == 1 or (arguments == 3 and hasattr(module, "has_gate")))
    experts = getattr(module, "num_experts", None)
    return owned if known and all(len(parameter) == experts for parameter in owned.values()) else {}


def expert_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules of `model` whose experts can be packed, or are, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, PackedExperts) or expert_parameters(module)
    }


def is_transposed(experts: torch.nn.Module) -> bool:
    """Whether a module keeps its matrices as (E, K, N): gpt-oss and Llama 4, which has no attribute for it."""
    return getattr(experts, "is_transposed", True)


def matrix_shape(experts: torch.nn.Module, name: str) -> tuple[int, int, int]:
    """(E, N, K) of the experts parameter `name`, a matrix W (N, K) per expert."""
    count, n, k = experts.get_parameter(name).shape
    return (count, k, n) if is_transposed(experts) else (count, n, k)


def matrices_of(experts: torch.nn.Module, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """The matrix (N, K) of each expert in a 3-D parameter of the module."""
    for matrix in parameter.detach():
        yield matrix.t().contiguous() if is_transposed(experts) else matrix


def pack_experts(experts: torch.nn.Module, packed: Mapping[str, PackedMatrices]) -> None:
    """Put `packed` in the place of the module's parameters. Its class becomes one derived from it and PackedExperts."""
    for name, matrices in packed.items():
        delattr(experts, name)
        experts.add_module(name, matrices.train(experts.training))
    if not isinstance(experts, PackedExperts):
        experts.__class__ = _packed_class(type(experts))


@cache
def _packed_class(kind: type) -> type:
    return type(f"Packed{kind.__name__}", (PackedExperts, kind), {})
