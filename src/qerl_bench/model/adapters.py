"""Where an adapter goes: every linear layer of the transformer blocks, found by structure, and their experts.

Routers, embeddings, the head and the towers of a multimodal model carry none. On packed experts, whose weight PEFT
cannot add an update to, the update is a low-rank term of its own; its tensors have PEFT's names and shapes, so that
PEFT loads them onto unpacked experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.utils import transformers_weight_conversion

from qerl_bench.aqn.adapted_layer import AdaptedLayer
from qerl_bench.quant.experts import PackedExperts, expert_modules, expert_parameters
from qerl_bench.quant.grouped import ExpertsAdapter
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quant.matrices import PackedMatrices
from qerl_bench.quant.packed_share import decoder_blocks, is_linear, routers


def block_linears(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The linear layers of the blocks, packed or not, by path; without routers.

    Nor the output layer of a Mamba mixer, whose fused kernels read its weight past any adapter; PEFT refuses it too.
    """
    prefix, blocks = decoder_blocks(model)
    left_out = routers(model)
    for path, mixer in blocks.named_modules(prefix=prefix):
        if {"A_log", "D"} <= {name for name, _ in mixer.named_parameters(recurse=False)}:
            left_out.add(f"{path}.out_proj")
    linears = {path: module for path, module in blocks.named_modules(prefix=prefix) if path not in left_out}
    return {path: module for path, module in linears.items() if is_linear(module) or isinstance(module, PackedLinear)}


def shortest_names(model: torch.nn.Module, paths: Collection[str]) -> list[str]:
    """`paths` of modules by the last part of each, where no other module of `model` has the same."""
    others = {_leaf(path) for path, _ in model.named_modules() if path not in paths}
    return list(dict.fromkeys(path if _leaf(path) in others else _leaf(path) for path in paths))


def experts_targets(model: torch.nn.Module) -> list[str]:
    """What PEFT calls `target_parameters` for all experts, packed or not."""
    return sorted(
        {
            f"{_leaf(path)}.{name}"
            for path, experts in expert_modules(model).items()
            for name in (experts.matrices() if isinstance(experts, PackedExperts) else expert_parameters(experts))
        }
    )


def has_packed_experts(model: torch.nn.Module) -> bool:
    return any(isinstance(module, PackedExperts) for module in model.modules())


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


@contextmanager
def names_taken_as_they_are() -> Iterator[None]:
    """Keep PEFT from reading names of layers, such as `gate_proj`, as those of experts in old checkpoints.

    It would adapt the experts in the place of a shared expert or a dense layer that has the name today.
    """
    replaced = transformers_weight_conversion._convert_peft_config_moe
    try:
        transformers_weight_conversion._convert_peft_config_moe = lambda *_: None
        yield
    finally:
        transformers_weight_conversion._convert_peft_config_moe = replaced


@dataclass(frozen=True)
class _Shape:
    """What PEFT asks of a parameter to make its adapter."""

    shape: torch.Size
    device: torch.device
    dtype: torch.dtype = torch.float32  # of the adapter
    requires_grad: bool = False


class LoRAExperts(ParamWrapper):
    """PEFT's adapter of one experts parameter, here packed. Wrappers of several parameters are nested, as in PEFT."""

    cast_adapter: ExpertsAdapter | None = None  # in the dtype of the input, inside `adapters_cast_to`

    @property
    def experts(self) -> PackedExperts:
        base = self.get_base_layer()
        assert isinstance(base, PackedExperts)
        return base

    @property
    def matrices(self) -> PackedMatrices:
        return self.experts.matrices()[self.parameter_name]

    @property
    def can_be_captured(self) -> bool:
        return self.experts.can_be_captured

    def get_param(self) -> Any:
        matrices = self.matrices
        n, k = matrices.out_features, matrices.in_features
        shape = (matrices.experts, k, n) if matrices.transposed else (matrices.experts, n, k)
        return _Shape(torch.Size(shape), matrices.device)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        experts = self.experts
        before = experts.adapters
        if not self.disable_adapters:
            experts.adapters = {**before, self.parameter_name: self.cast_adapter or self.adapter()}
        try:
            return self.base_layer(x, *args, **kwargs)
        finally:
            experts.adapters = before

    def adapter(self) -> ExpertsAdapter:
        """The matrices of all experts."""
        (name,) = self.active_adapters
        down, up = self.lora_A[name].get_parameter("weight"), self.lora_B[name].get_parameter("weight")
        a = down.unflatten(0, (self.num_experts, -1))  # (E, r, in)
        b = up.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)  # (E, out, r)
        if a.shape[2] != self.matrices.in_features:
            a, b = b.mT, a.mT  # PEFT does not know that Llama 4 keeps its matrices as (E, K, N)
        return ExpertsAdapter(a, b, self.scaling[name])


def adapted_layers(model: torch.nn.Module) -> dict[str, AdaptedLayer]:
    """The layers with an adapter, by the name of its matrix B."""
    found = {path: module for path, module in model.named_modules() if isinstance(module, LoraLayer)}
    return {
        f"{path}.lora_B.{name}": AdaptedLayer(
            layer.lora_A[name], layer.lora_B[name], layer.scaling[name], partial(_frozen_weight, layer)
        )
        for path, layer in found.items()
        for name in layer.active_adapters
    }


def _frozen_weight(layer: Any) -> torch.Tensor:
    """The weight that an adapter is added to, packed or not."""
    if isinstance(layer, LoRAExperts):
        return layer.matrices.parameter(torch.bfloat16)
    if isinstance(layer, ParamWrapper):
        return layer.get_param()
    base = layer.get_base_layer()
    return base.dequantized() if isinstance(base, PackedLinear) else base.weight


def adapt_packed_experts(adapter: PeftModel, config: LoraConfig) -> None:
    """Add an adapter to each parameter of each packed experts module, after PEFT has adapted the linear layers."""
    model = adapter.get_base_model()
    packed = {path: module for path, module in model.named_modules() if isinstance(module, PackedExperts)}
    (adapter_name,) = adapter.peft_config
    for path, experts in packed.items():
        wrapped: torch.nn.Module = experts
        for name in experts.matrices():
            wrapped = LoRAExperts(wrapped, adapter_name, name, config, r=config.r, lora_alpha=config.lora_alpha)
        model.set_submodule(path, wrapped)
