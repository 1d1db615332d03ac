"""engine=hf on a GPU: one decoding step as a CUDA graph over rows that a queue refills.

Launching the kernels of a step one by one takes several times as long as running them. Here all buffers keep their
address and everything that changes is read on the GPU, so the step is captured once for each size of the batch and
replayed for each token. Every few tokens the host looks which rows are done, gives them to the next requests
(rollout_queue.py) and reads the prompts of these. Adapters and norm scales are copied to fixed places, so graphs also
serve later rollouts (sampler.py). The forward pass is written out for the models in `recordable.FAMILIES`, with one
kernel for each operation between the matmuls (`qerl_kernels.decoder_layer`); experts run as the model's own module.

With `limits.invariant` the batch has one size, prompts are read one by one, and attention sums in pieces that depend on
the row alone (`decoder_layer`): no matmul changes its shape with the company that a request has. Left out: fewer pages
for layers that see a window only, and reading a long prompt in parts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from peft.tuners.lora import LoraLayer

from qerl_bench.engine.base import Completion, Sampling
from qerl_bench.engine.decoder_blocks import (
    Attend,
    Block,
    adapted_layers,
    blocks_of,
    kv_bytes,
    layers_of,
    norms_of,
    packed_layers,
)
from qerl_bench.engine.dequantized import Dequantized
from qerl_bench.engine.recordable import ACTIVATIONS, FAMILIES, activation_of, experts_of
from qerl_bench.engine.rollout_queue import (
    Limits,
    Request,
    RolloutQueue,
    SharedPrompt,
    buckets,
    pages_of,
    reading_chunks,
)
from qerl_bench.model.adapters import LoRAExperts
from qerl_bench.model.kernels import FusedLinears, LoRALinear
from qerl_bench.model.lm_head import decoder_of
from qerl_bench.model.packing import Packing
from qerl_bench.model.policy import Policy
from qerl_core.process.progress import bar
from qerl_kernels import decoder_layer as fused_operations
from qerl_kernels import decoder_layer_reference, grouped
from qerl_kernels.decode import few_tokens
from qerl_kernels.decoder_layer import PAGE, cluster_size
from qerl_kernels.decoder_layer_reference import in_order
from qerl_kernels.row_fields import DONE, DRAWN, FIELDS, KEY, LENGTH, PLACE, PREFIX, TOKEN
from qerl_kernels.rows import advance, advance_reference
from qerl_kernels.sampling import draw, draw_seeded, uniforms
from qerl_kernels.scratch import owned_by

CHECK_STOP_EVERY = 16  # tokens between two checks of which rows are done; each makes the host wait for the GPU


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


class Decoding:
    """Buffers for a batch of up to `size.rows` rows, the step that reads and writes them, and its recordings.

    Row i of the batch is what column i of `state`, row i of `table` and the pages named there say. Rows behind the last
    request compute on page 0 and write to the last row of the results. Make, start and run it inside
    `adapters_cast_to`.
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
        self.few = few_tokens(device)
        packed = chain.from_iterable(map(packed_layers, self.blocks)) if size.rows > self.few else ()
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

    def start(self, requests: list[Request], sampling: Sampling, keys: list[int]) -> None:
        """Take up the policy as it is now, record the steps that are not recorded yet, and queue `requests`."""
        self.sampling, self.keys, self.samples = sampling, keys, len(keys) // (requests[-1].prompt.index + 1)
        self.queue = RolloutQueue(requests, self.size.rows, self.size.pages)
        together = self.samples > 1 or self.limits.invariant  # one sample of each prompt has nobody to share with
        self.shares = together and any(request.prompt.whole_pages > 0 for request in requests)
        self.rows_computed, self.changed = 0, False
        self._refresh()
        self._upload()
        if self.limits.invariant or len(requests) > self.few:  # invariant: all rows are computed, whoever is in them
            self.dequantized.make(partial(_memory, device=self.state.device))
        started = time.perf_counter()
        if self.uses_graph:
            self._record()
        self.recording_s = time.perf_counter() - started

    def forget_dequantized(self) -> None:
        """Free the weights in 16 bits, and the recordings that read them."""
        if self.dequantized.made:
            self.graphs = {key: graph for key, graph in self.graphs.items() if key[0] <= self.few}
            if self.uses_graph and not self.graphs:  # their memory has gone with the last of them
                self.pool, self.graph_bytes = torch.cuda.graph_pool_handle(), 0
        self.dequantized.drop()

    def run(self) -> Iterator[tuple[int, Completion]]:
        """Decode all requests; yields the number of each with its completion, as they end."""
        queue = self.queue
        yield from self._admit()
        while queue.batch:
            steps = queue.steps(CHECK_STOP_EVERY)
            if queue.grow(steps) or self.changed:
                self._upload()
            size = min(size for size in self.sizes if size >= len(queue.batch))
            for _ in range(steps):
                self._advance(size)
            self.rows_computed += steps * size
            self._poll_rows()
            yield from self._retire()
            yield from self._admit()

    def _admit(self) -> Iterator[tuple[int, Completion]]:
        """Fill the batch from the queue. Yields those that end with the token drawn from their prompt."""
        while entered := self.queue.admit():
            self.changed = True
            unread = {request.prompt.index: request.prompt for request in entered if not request.prompt.is_read}
            for chunk in reading_chunks(
                list(unread.values()), 0 if self.limits.invariant else self.limits.prefill_tokens
            ):
                self._read(chunk)
            self._copy_beginnings(entered)
            for request in entered:
                request.token, request.drawn = request.prompt.first[request.sample][0], 1
                request.done = request.limit == 1 or (request.stops and request.token in self.policy.stop_ids)
                if self.numbers is not None:
                    numbers = uniforms([self.keys[request.index]], request.limit)[0]
                    self.numbers[request.place, : request.limit] = torch.from_numpy(numbers)
            yield from self._retire()

    def _poll_rows(self) -> None:
        """Learn from the device where every row is."""
        state = self.state[:, : len(self.queue.batch)].tolist()
        for request, token, drawn, done in zip(self.queue.batch, state[TOKEN], state[DRAWN], state[DONE], strict=True):
            request.token, request.drawn, request.done = token, drawn, bool(done)

    def _retire(self) -> Iterator[tuple[int, Completion]]:
        """Take the requests that are done out of the batch, and yield them."""
        finished = self.queue.retire()
        if not finished:
            return
        self.changed = True
        places = torch.tensor([request.place for request in finished], device=self.state.device)
        width = max(request.drawn for request in finished)
        columns = [result[places, :width].tolist() for result in self.results]
        for request, *drawn in zip(finished, *columns, strict=True):
            for column, first in zip(drawn, request.prompt.first[request.sample], strict=True):
                column[0] = first
                del column[request.drawn :]
            yield request.index, (drawn[0], drawn[1], drawn[2])

    def _upload(self) -> None:
        """Write the batch to the device."""
        rows, batch, self.changed = self.size.rows, self.queue.batch, False
        idle = {"done": 1, "place": rows}
        state = np.tile(np.array([[idle.get(name, 0)] for name in FIELDS]), rows)
        table = np.zeros(self.table.shape, dtype=np.int32)
        clusters = np.full(self.clusters.shape, -1, dtype=np.int32)
        state[:, : len(batch)] = np.array([self._column(request) for request in batch]).T
        pages = [[*request.prompt.pages[: request.prompt.whole_pages], *request.pages] for request in batch]
        held = np.arange(table.shape[1]) < np.array([len(one) for one in pages], dtype=int)[:, None]
        table[: len(batch)][held] = [*chain.from_iterable(pages)]
        sharing: dict[int, list[int]] = {}
        for row, request in enumerate(batch if self.shares else ()):
            if request.prompt.whole_pages:
                sharing.setdefault(request.prompt.index, []).append(row)
        members = clusters.shape[1]
        parts = [group[at : at + members] for group in sharing.values() for at in range(0, len(group), members)]
        for cluster, part in enumerate(parts):
            clusters[cluster, : len(part)] = part
        for buffer, new in ((self.state, state), (self.table, table), (self.clusters, clusters)):
            buffer.copy_(torch.from_numpy(new))

    def _column(self, request: Request) -> tuple[int, ...]:
        """What the device has to know of a request, in the order of FIELDS."""
        known = (request.token, request.length, request.drawn, request.done, request.limit, request.stops)
        prefix = request.prompt.whole_pages * PAGE if self.shares else 0
        return (*known, request.place, prefix, self.keys[request.index])

    # --- on the device ------------------------------------------------------------------------------------------------

    def _record(self) -> None:
        """Record the step of every size that this rollout may use. Meanwhile all rows are idle."""
        sampling = self.sampling
        keys = {size: (size, self.shares, sampling.temperature, sampling.top_p) for size in self.sizes}
        reads_copies = self.dequantized.made or not self.dequantized.layers  # as later recordings of many rows will
        most = self.max_captured if reads_copies else min(self.few, self.max_captured)
        missing = [size for size in self.sizes if keys[size] not in self.graphs and size <= most]
        for size in bar(missing, "recording") if missing else ():
            self._step(size)  # compiles and allocates what a capture needs
            before, graph = torch.cuda.memory_reserved(self.state.device), torch.cuda.CUDAGraph()
            stream = torch.cuda.current_stream(self.state.device)
            with torch.cuda.graph(graph, pool=self.pool, stream=stream):
                self._step(size)
            self.graph_bytes += max(0, torch.cuda.memory_reserved(self.state.device) - before)
            self.graphs[keys[size]] = graph

    def _advance(self, size: int) -> None:
        """Draw one more token for each of the first `size` rows."""
        graph = self.graphs.get((size, self.shares, self.sampling.temperature, self.sampling.top_p))
        if graph is None:
            self._step(size)
        else:
            graph.replay()

    def _step(self, size: int) -> None:
        state, sampling = self.state[:, :size], self.sampling
        table, clusters = self.table[:size], self.clusters[:size] if self.shares else None
        lengths, prefixes = state[LENGTH], state[PREFIX]

        def attend(block: Block, q: torch.Tensor) -> torch.Tensor:
            scaling = block.module.self_attn.scaling
            where = (table, lengths, prefixes, clusters)
            return self.ops.attend(q, block.keys, block.values, *where, scaling, block.window)

        rounding = self.policy.rounding
        with owned_by(self), nullcontext() if rounding is None else rounding.skipping(state[DONE]):
            logits = self.policy.head(self._hidden(state[TOKEN], lengths, table, attend))
            if self.numbers is None:
                drawn = draw_seeded(logits, sampling.temperature, state[KEY], state[DRAWN], top_p=sampling.top_p)
                advance(self.state, drawn, self.stop_ids, self.results)
            else:
                numbers = self.numbers[state[PLACE], state[DRAWN]]
                drawn = draw(logits, sampling.temperature, numbers, top_p=sampling.top_p)
                advance_reference(self.state, drawn, self.stop_ids, self.results)

    def _hidden(
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

    def _read(self, prompts: list[SharedPrompt]) -> None:
        """Store keys and values of `prompts`, in one row without padding, and draw the first token of each sample."""
        device = self.state.device
        lengths = [len(prompt.ids) for prompt in prompts]
        width = max(lengths)
        last = torch.arange(width) == torch.tensor(lengths)[:, None] - 1  # (P, width) the last token of each prompt
        packing = Packing.from_mask(last).to(device)
        tokens = torch.tensor([token for prompt in prompts for token in prompt.ids], device=device)
        columns = self.size.columns
        pages = [prompt.pages + [0] * (columns - len(prompt.pages)) for prompt in prompts]
        table = torch.tensor(pages, dtype=torch.int32, device=device)

        def attend(block: Block, q: torch.Tensor) -> torch.Tensor:
            keys, values = (in_order(x, table[:, : pages_of(width)])[:, :, :width] for x in (block.keys, block.values))
            scaling = block.module.self_attn.scaling
            mixed = _causal(packing.unpack(q).transpose(1, 2), keys, values, scaling, block.window)
            return packing.pack(mixed.transpose(1, 2)).flatten(1)

        hidden = self._hidden(tokens, packing.positions, table[packing.indices // width], attend)
        logits = self.policy.head(hidden[packing.places])
        for start in range(0, len(prompts) * self.samples, self.size.rows):
            stop = min(start + self.size.rows, len(prompts) * self.samples)
            self._draw_first(prompts, logits, range(start, stop))
        for prompt in prompts:
            prompt.is_read = True

    def _draw_first(self, prompts: list[SharedPrompt], logits: torch.Tensor, which: range) -> None:
        """Draw the first token of sample i % G of prompt i // G for i in `which`, unless it was drawn before."""
        device, sampling = logits.device, self.sampling
        owners = [prompts[i // self.samples] for i in which]
        keys = [
            self.keys[owner.index * self.samples + i % self.samples] for owner, i in zip(owners, which, strict=True)
        ]
        repeated = logits[torch.tensor([i // self.samples for i in which], device=device)]
        if self.numbers is None:
            drawn = draw_seeded(
                repeated, sampling.temperature, torch.tensor(keys, device=device), 0, top_p=sampling.top_p
            )
        else:
            drawn = draw(
                repeated, sampling.temperature, torch.from_numpy(uniforms(keys, 1)[:, 0]), top_p=sampling.top_p
            )
        for owner, *one in zip(owners, *(column.tolist() for column in drawn), strict=True):
            if len(owner.first) < self.samples:
                owner.first.append((one[0], one[1], one[2]))

    def _copy_beginnings(self, entered: list[Request]) -> None:
        """Give each request a copy of the last page of its prompt, if that is not whole: it goes on there."""
        pairs = [(request.prompt.pages[-1], request.pages[0]) for request in entered if len(request.prompt.ids) % PAGE]
        if pairs:
            source, target = torch.tensor(pairs, device=self.state.device).t()
            for cache in (cache for pair in self.caches for cache in pair):
                cache[target] = cache[source]

    # --- what recordings have read -----------------------------------------------------------------------------------

    def _refresh(self) -> None:
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


def _causal(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    """Causal attention (B, H, T, D) of q to keys and values (B, KV, T, D), over the last `window` of them if given."""
    width, shared = q.shape[2], q.shape[1] // keys.shape[1]
    if window is None or window >= width:
        return torch.nn.functional.scaled_dot_product_attention(
            q, keys, values, is_causal=True, scale=scaling, enable_gqa=shared > 1
        )
    at = torch.arange(width, device=q.device)
    visible = (at <= at[:, None]) & (at > at[:, None] - window)
    keys, values = (x.repeat_interleave(shared, 1) for x in (keys, values))  # fast kernels share heads without a mask
    return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=visible, scale=scaling)
