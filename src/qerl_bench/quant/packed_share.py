"""Which weights of a model are packed, and which of its linear layers could be.

Counted are the matrices of the transformer blocks: every parameter of two or more dimensions, experts included, without
stacked biases. Left out: embeddings, the head, and the towers of a multimodal model, which stay in 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch

from qerl_bench.quant.experts import PackedExperts, expert_modules
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quant.matrices import PackedMatrices


def decoder_blocks(model: Any) -> tuple[str, torch.nn.ModuleList]:
    """Name and list of the text decoder's blocks: the first list as long as the config says; empty if there is none."""
    config = getattr(model, "config", None)
    count = getattr(config.get_text_config() if config is not None else None, "num_hidden_layers", None)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    inside = {id(module) for module in decoder.modules()}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and id(module) in inside:
            return name, module
    return "", torch.nn.ModuleList()


def is_linear(module: torch.nn.Module) -> bool:
    """Whether the module computes what `torch.nn.Linear` does; a subclass with a forward of its own may not."""
    return isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward


def routers(model: torch.nn.Module) -> set[str]:
    """The linear layers that weigh experts: beside an experts module, with an output per expert or a single one.

    Nobody packs or adapts them: they are small, and their error changes which experts run.
    """
    found = set()
    for path, experts in expert_modules(model).items():
        parent = path.rpartition(".")[0]
        for name, module in model.get_submodule(parent).named_modules():
            if isinstance(module, torch.nn.Linear) and module.out_features in (1, experts.num_experts):
                found.add(f"{parent}.{name}" if parent else name)
    return found


def weights_of(module: torch.nn.Module) -> int:
    """The number of packed weights that the module itself owns."""
    if isinstance(module, PackedLinear):
        return module.out_features * module.in_features
    if isinstance(module, PackedMatrices):
        return module.experts * module.out_features * module.in_features
    return 0


def packed_share(model: torch.nn.Module) -> float:
    """Packed weights over all weights of the matrices inside the transformer blocks; 1 for a model without blocks."""
    packed = sum(map(weights_of, decoder_blocks(model)[1].modules()))
    unpacked = sum(unpacked_parameters(model).values())
    return packed / (packed + unpacked) if packed + unpacked else 1.0


def unpacked_parameters(model: torch.nn.Module) -> dict[str, int]:
    """Name and number of weights of each matrix inside the transformer blocks that is not packed, adapters excepted."""
    prefix, blocks = decoder_blocks(model)
    found = {}
    for path, module in blocks.named_modules(prefix=prefix):
        stacked_biases = isinstance(module, PackedExperts) or any(
            p.dim() == 3 for p in module.parameters(recurse=False)
        )
        for name, parameter in module.named_parameters(recurse=False):
            is_bias = stacked_biases and name.endswith("bias")
            if parameter.dim() >= 2 and not is_bias and ".lora_" not in f"{path}.{name}":
                found[f"{path}.{name}"] = parameter.numel()
    return found


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a checkpoint holds, such as a router's correction, by name; without those of packed layers."""
    found, state = {}, model.state_dict().keys()
    for path, module in model.named_modules():
        if not isinstance(module, PackedLinear | PackedMatrices):
            buffers = {f"{path}.{name}" if path else name: b for name, b in module.named_buffers(recurse=False)}
            found |= {name: buffer for name, buffer in buffers.items() if name in state}
    return found
