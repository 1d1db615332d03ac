"""What a recorded decoding step reads and writes: pages, tables and results, and the step's forward pass.

All buffers keep their address, so that a recording serves later rollouts (hf_graph.py has one rollout). The forward
pass is written out for the models in `recordable.FAMILIES`, with one kernel for each operation between the matmuls
(`qerl_kernels.decoder_layer`); experts run as the model's own module. Left out: fewer pages for layers that see a
window only.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer

from qerl_bench.engine.decoder_blocks import (
    Attend,
    adapted_layers,
    blocks_of,
    kv_bytes,
    layers_of,
    norms_of,
    packed_layers,
)
from qerl_bench.engine.dequantized import Dequantized
from qerl_bench.engine.recordable import ACTIVATIONS, FAMILIES, activation_of, experts_of
from qerl_bench.engine.rollout_queue import Limits, buckets
from qerl_bench.model.adapters import LoRAExperts
from qerl_bench.model.kernels import FusedLinears, LoRALinear
from qerl_bench.model.lm_head import decoder_of
from qerl_bench.model.policy import Policy
from qerl_kernels import decoder_layer as fused_operations
from qerl_kernels import decoder_layer_reference, grouped
from qerl_kernels.decode import few_tokens
from qerl_kernels.decoder_layer import PAGE, cluster_size
from qerl_kernels.row_fields import FIELDS


def _memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor with undefined contents, in memory of the stream of training, which reuses it later."""
    if device.type != "cuda":
        return torch.empty(shape, dtype=dtype)
    with torch.cuda.stream(torch.cuda.default_stream(device)):
        return torch.empty(shape, dtype=dtype, device=device)


class BufferSize(NamedTuple):
    """What buffers have room for."""

    rows: int
    pages: int
    least_pages: int  # with fewer, some request could never be finished
    columns: int  # pages of one row
    tokens: int  # of one completion


class Buffers:
    """Buffers for a batch of up to `size.rows` rows, the forward pass over them, and recordings of its steps.

    Row i of the batch is what column i of `state`, row i of `table` and the pages named there say. Rows behind the last
    request compute on page 0 and write to the last row of the results. Make and use them inside `adapters_cast_to`.
    """

    def __init__(self, policy: Policy, limits: Limits, size: BufferSize) -> None:
        device, dtype = policy.device, policy.model.dtype
        self.policy, self.limits, self.size, self.uses_graph = policy, limits, size, device.type == "cuda"
        self.ops = fused_operations if policy.fused else decoder_layer_reference
        self.decoder: Any = decoder_of(policy.model)
        config = self.decoder.config
        self.norms = FAMILIES[config.model_type]
        self.activation = getattr(self.ops, ACTIVATIONS[str(activation_of(config))])
        self.cache_bytes = size.pages * PAGE * kv_bytes(policy)
        heads = config.num_key_value_heads
        self.caches = [  # zeros, so that what no row has written is finite
            [_memory((size.pages, heads, PAGE, layer.self_attn.head_dim), dtype, device).zero_() for _ in "kv"]
            for layer in layers_of(policy)
        ]
        self.adapters = [
            (layer, layer.cast_adapter) for layer in adapted_layers(policy) if layer.cast_adapter is not None
        ]
        self.blocks = blocks_of(policy, self.caches, size.columns * PAGE)
        self.small_batch = few_tokens(device)
        packed = chain.from_iterable(map(packed_layers, self.blocks)) if size.rows > self.small_batch else ()
        self.dequantized = Dequantized(packed, dtype, limits.dequantized_gib)
        self.last_scale = self.decoder.norm.weight.float().clone()
        rows, places, columns = size.rows, size.rows + 1, size.tokens + 1
        self.state = torch.zeros(len(FIELDS), rows, dtype=torch.long, device=device)
        self.table = torch.zeros(rows, size.columns, dtype=torch.int32, device=device)
        members = cluster_size(config.num_attention_heads // heads)
        self.clusters = torch.full((rows, members), -1, dtype=torch.int32, device=device)
        self.results = (
            torch.zeros(places, columns, dtype=torch.long, device=device),
            torch.zeros(places, columns, device=device),
            torch.zeros(places, columns, device=device),
        )
        self.numbers = None if policy.fused else torch.zeros(places, columns, dtype=torch.float64)
        self.stop_ids = torch.tensor(sorted(policy.stop_ids), device=device)
        packed_experts = any(hasattr(experts, "can_be_captured") for experts in experts_of(self.decoder))
        self.max_captured = grouped.MAX_TOKENS if packed_experts else rows  # rows: with more, experts ask the host
        self.sizes = [rows] if limits.invariant else buckets(rows)
        self.graphs: dict[tuple[int, bool, float, float], torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.uses_graph else None
        self.graph_bytes = 0
        self.graph_key = self._graph_key()

    def fits(self, size: BufferSize) -> bool:
        """Whether these buffers serve such a rollout, and recordings still find everything where it was.

        Three quarters of the pages are enough: with fewer of them fewer rows run, but nothing is recorded again.
        """
        mine = self.size
        room = mine.rows >= size.rows and mine.columns >= size.columns and mine.tokens >= size.tokens
        pages = mine.pages >= max(size.least_pages, 3 * size.pages // 4)
        same_rows = mine.rows == size.rows or not self.limits.invariant
        return room and pages and same_rows and self.graph_key == self._graph_key()

    @property
    def kept_bytes(self) -> int:
        """Memory that training does not have while this is kept."""
        return self.cache_bytes + self.graph_bytes + sum(result.nbytes for result in self.results)

    def dequantize(self) -> None:
        """Make the weights in 16 bits that steps of many rows multiply by."""
        self.dequantized.make(partial(_memory, device=self.state.device))

    def forget_dequantized(self) -> None:
        """Free the weights in 16 bits, and the recordings that read them."""
        if self.dequantized.made:
            self.graphs = {key: graph for key, graph in self.graphs.items() if key[0] <= self.small_batch}
            if self.uses_graph and not self.graphs:  # their memory has gone with the last of them
                self.pool, self.graph_bytes = torch.cuda.graph_pool_handle(), 0
        self.dequantized.drop()

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Last hidden states (n, H) of `tokens` (n,): the model's forward pass, written out layer by layer.

        Stores the keys and values of all tokens in the pages that `table` (n, columns) has for their `positions` (n,).
        """
        ops, names, unit_offset = self.ops, self.norms, self.norms.unit_offset
        epsilon = self.decoder.config.rms_norm_eps

        def normed(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            """The norm of each head of x (n, heads * width of the norm), whose rows may be strided."""
            heads = x.contiguous().view(-1, len(scale))  # a reshape leaves the rows of a single head strided
            return ops.add_norm(heads, None, scale, epsilon, unit_offset)[1].view(x.shape)

        x, delta = self.decoder.embed_tokens(tokens), None  # (n, H)
        for block in self.blocks:
            attention, mlp, scales = block.module.self_attn, block.module.mlp, block.scales
            x, h = ops.add_norm(x, delta, scales[names.before_attention], epsilon, unit_offset)
            q, k, v = block.qkv(h)
            if "q_norm" in scales:
                q, k = normed(scales["q_norm"], q), normed(scales["k_norm"], k)
            q = ops.rotate_store(q, k, v, block.cos, block.sin, positions, table, block.keys, block.values)
            delta = attention.o_proj(attend(block, q))
            if names.after_attention is not None:
                delta = normed(scales[names.after_attention], delta)
            x, h = ops.add_norm(x, delta, scales[names.before_mlp], epsilon, unit_offset)
            delta = mlp(h[None])[0] if block.gate_up is None else mlp.down_proj(self.activation(*block.gate_up(h)))
            if names.after_mlp is not None:
                delta = normed(scales[names.after_mlp], delta)
        return ops.add_norm(x, delta, self.last_scale, epsilon, unit_offset)[1]

    def refresh(self) -> None:
        """Copy the policy's present adapters and norm scales to where recordings read them."""
        for layer, pinned in self.adapters:
            fresh = layer.cast_adapter
            if fresh is not pinned:
                pinned.a.copy_(fresh.a)
                pinned.b.copy_(fresh.b)
                layer.cast_adapter = pinned
        for block in self.blocks:
            for fused in (block.qkv, block.gate_up):
                if isinstance(fused, FusedLinears):
                    fused.refresh()
            for name, norm in norms_of(block.module).items():
                block.scales[name].copy_(norm.weight)
        self.last_scale.copy_(self.decoder.norm.weight)

    def _graph_key(self) -> tuple[object, ...]:
        """Everything of the policy that is part of a recording: addresses, except of what is copied, and adapters."""
        norms = [norm for layer in layers_of(self.policy) for norm in norms_of(layer).values()]
        copied = {id(norm.weight) for norm in (*norms, self.decoder.norm)}
        modules = [*self.policy.model.modules()]
        own = [tensors for module in modules for tensors in (module._parameters, module._buffers) if tensors]
        tensors = [tensor for named in own for tensor in named.values() if tensor is not None]
        layers = [module for module in modules if isinstance(module, LoraLayer)]
        adapters = [(layer.disable_adapters, layer.merged, *layer.scaling.values()) for layer in layers]
        cast = [layer.cast_adapter is not None for layer in modules if isinstance(layer, LoRALinear | LoRAExperts)]
        rounds = self.policy.rounding is not None and self.policy.rounding.on
        return (rounds, *(tensor.data_ptr() for tensor in tensors if id(tensor) not in copied), *adapters, *cast)
