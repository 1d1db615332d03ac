"""The blocks of a policy as a recorded step runs them (hf_graph.py): joined matmuls, norm scales, pages, rotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from qerl_bench.engine.recordable import ropes_of
from qerl_bench.model.adapters import LoRAExperts
from qerl_bench.model.kernels import FusedLinears, LoRALinear, fuse_linears
from qerl_bench.model.lm_head import decoder_of
from qerl_bench.model.policy import Policy
from qerl_bench.quant.linear import PackedLinear


class Block(NamedTuple):
    """A transformer block, and what its part of the step needs besides its weights."""

    module: Any
    qkv: Any
    gate_up: Any  # None if the MLP runs as the module it is
    scales: dict[str, torch.Tensor]  # of its norms, by name
    keys: torch.Tensor  # (pages, KV, PAGE, D)
    values: torch.Tensor
    cos: torch.Tensor  # (columns * PAGE, D)
    sin: torch.Tensor
    window: int | None  # how many keys a query sees; None: all


Attend = Callable[[Block, torch.Tensor], torch.Tensor]  # queries (n, H, D) to mixed values (n, H * D)


def kv_bytes(policy: Policy) -> int:
    """Bytes of the keys and values of one token."""
    config: Any = decoder_of(policy.model).config
    layers = [layer.self_attn.head_dim for layer in layers_of(policy)]
    return 2 * config.num_key_value_heads * sum(layers) * policy.model.dtype.itemsize


def layers_of(policy: Policy) -> list[Any]:
    decoder: Any = decoder_of(policy.model)
    return list(decoder.layers)


def packed_layers(block: Block) -> list[PackedLinear]:
    """The packed layers whose weights the step of a block rebuilds: joined ones, and those that are not joined."""
    joined = [fused for fused in (block.qkv, block.gate_up) if isinstance(fused, FusedLinears)]
    replaced = {id(module) for fused in joined for layer in fused.layers for module in layer.modules()}
    bases = [fused.base for fused in joined]
    own = [module for module in block.module.modules() if id(module) not in replaced]
    packed = [module for module in (*bases, *own) if isinstance(module, PackedLinear)]
    return [layer for layer in packed if not layer.multiplies_fp8]


def adapted_layers(policy: Policy) -> list[Any]:
    return [module for module in policy.model.modules() if isinstance(module, LoRALinear | LoRAExperts)]


def norms_of(layer: Any) -> dict[str, Any]:
    """The norms of a block by name, also those of queries and keys."""
    attention = layer.self_attn
    found = {name: module for name, module in layer.named_children() if name.endswith("layernorm")}
    return found | {name: getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)}


def blocks_of(policy: Policy, caches: list[list[torch.Tensor]], width: int) -> list[Block]:
    """The blocks of the policy, with rotary tables of `width` positions. Call this inside `adapters_cast_to`."""
    decoder: Any = decoder_of(policy.model)
    config = decoder.config
    first = caches[0][0]
    positions = torch.arange(width, device=first.device)[None]
    tables = {kind: decoder.rotary_emb(first, positions, *([kind] if kind else [])) for kind in ropes_of(config)}
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=policy.model.config).layers]
    kinds = [None] * len(caches) if None in tables else config.layer_types
    blocks = []
    for module, kind, (keys, values), window in zip(decoder.layers, kinds, caches, windows, strict=True):
        attention, mlp = module.self_attn, module.mlp
        qkv = fuse_linears([attention.q_proj, attention.k_proj, attention.v_proj])
        gate_up = fuse_linears([mlp.gate_proj, mlp.up_proj]) if hasattr(mlp, "gate_proj") else None
        scales = {name: norm.weight.float().clone() for name, norm in norms_of(module).items()}
        cos, sin = (angles[0].contiguous() for angles in tables[kind])
        blocks.append(Block(module, qkv, gate_up, scales, keys, values, cos, sin, window))
    return blocks
