"""The forward pass of a dense transformer block in training, written out over fused kernels.

transformers runs a block module by module and operation by operation, so that between the matmuls each activation is
read and written many times. Here `qerl_kernels.training_block` does what is between them, and query, key and value are
one matmul, as are gate and up, over the packed copy that sampling reads too (`model/kernels.py`). The modules stay:
they hold the parameters, and noise, adapters and checkpoints reach them as before. Left out: blocks of other model
types, which run their modules, and so does every block that reads a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from transformers import PreTrainedModel

from qerl_bench.model.attention import CACHES, attention
from qerl_bench.model.attention import NAME as OWN_ATTENTION
from qerl_bench.model.kernels import JoinedLinears
from qerl_kernels import training_block

# Model types of text decoders whose blocks are that of Llama, up to biases, windows, and norms of queries and keys.
MODEL_TYPES = ("llama", "mistral", "ministral", "qwen2", "qwen3", "seed_oss")


class FusedBlock:
    """The forward pass of the block `module`, with the functions of `training_block` or of its reference as `ops`."""

    def __init__(self, module: Any, ops: ModuleType) -> None:
        self.module, self.ops = module, ops
        own, mlp = module.self_attn, module.mlp
        self.qkv = JoinedLinears([own.q_proj, own.k_proj, own.v_proj])
        self.gate_up = JoinedLinears([mlp.gate_proj, mlp.up_proj])
        config = own.config
        self.heads = config.num_attention_heads, config.num_key_value_heads
        self.window = config.sliding_window if config.model_type == "mistral" else getattr(own, "sliding_window", None)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """As the module's own: (B, T, H) to (B, T, H); `position_embeddings` are cosines and sines (1 or B, T, D)."""
        module, ops = self.module, self.ops
        options = {name: value for name, value in options.items() if name not in CACHES or value is not None}
        if any(name in options for name in CACHES):
            options |= {"attention_mask": attention_mask, "position_embeddings": position_embeddings}
            return type(module).forward(module, hidden_states, **options)
        assert position_embeddings is not None
        batch, length, width = hidden_states.shape
        own, norms = module.self_attn, (module.input_layernorm, module.post_attention_layernorm)
        cos, sin = (angles.expand(batch, -1, -1).flatten(0, 1) for angles in position_embeddings)
        head_norms = (own.q_norm.weight, own.k_norm.weight) if hasattr(own, "q_norm") else None

        x, h = ops.add_norm(hidden_states.reshape(-1, width), None, norms[0].weight, norms[0].variance_epsilon)
        qkv = ops.rotate(self.qkv(h), cos, sin, self.heads, head_norms, norms[0].variance_epsilon)
        q, k, v = (part.unflatten(0, (batch, length)).transpose(1, 2) for part in qkv)  # (B, heads, T, D)
        options |= {"scaling": own.scaling, "sliding_window": self.window}
        mixed, _ = attention(own, q, k, v, attention_mask, **options)  # (B, T, heads, D)
        delta = own.o_proj(mixed.reshape(len(x), -1))
        x, h = ops.add_norm(x, delta, norms[1].weight, norms[1].variance_epsilon)
        delta = module.mlp.down_proj(ops.swiglu(self.gate_up(h)))
        return (x + delta).view(batch, length, width)


def fuse_blocks(decoder: PreTrainedModel, ops: ModuleType = training_block) -> str | None:
    """Let the blocks of `decoder` run as `FusedBlock`, adapters in place; returns why they keep their modules, or None.

    Call it once kernels and attention are chosen.
    """
    config: Any = decoder.config
    layers: Any = decoder.layers if hasattr(decoder, "layers") else []
    scales = [parameter for name, parameter in decoder.named_parameters() if "norm" in name]
    if config.model_type not in MODEL_TYPES or config.hidden_act != "silu":
        return f"the fused block is not written for {config.model_type}"
    if config._attn_implementation != OWN_ATTENTION:
        return "its attention was not replaced"
    if any(scale.requires_grad for scale in scales):
        return "norm scales are trained"
    for module in layers:
        module.forward = FusedBlock(module, ops)  # an attribute of this module hides its class's
    return None


@contextmanager
def without_fused_blocks(model: torch.nn.Module) -> Iterator[None]:
    """Context in which the blocks of `model` run their modules, which hooks can then see."""
    fused = [(module, module.forward) for module in model.modules() if isinstance(module.forward, FusedBlock)]
    try:
        for module, _ in fused:
            del module.forward
        yield
    finally:
        for module, forward in fused:
            module.forward = forward
