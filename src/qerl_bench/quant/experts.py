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
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType

import torch

from qerl_bench.quant.grouped import ExpertsAdapter, Groups, grouped_linear, grouped_lora, groups_of
from qerl_bench.quant.matrices import PackedMatrices
from qerl_kernels import grouped

_PARAMETERS = ({"gate_up_proj", "down_proj"}, {"up_proj", "down_proj"})


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
