"""engine=hf on a GPU: one decoding step as a CUDA graph over rows that a queue refills.

Launching the kernels of a step one by one takes several times as long as running them. Here all buffers keep their
address (decode_buffers.py) and everything that changes is read on the GPU, so the step is captured once for each size
of the batch and replayed for each token. Every few tokens the host looks which rows are done, gives them to the next
requests (rollout_queue.py) and reads the prompts of these. Adapters and norm scales are copied to fixed places, so
graphs also serve later rollouts (sampler.py).

With `limits.invariant` the batch has one size, prompts are read one by one, and attention sums in pieces that depend on
the row alone (`decoder_layer`): no shape of a matmul depends on the other requests in the batch. Left out: reading
a long prompt in parts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain

import numpy as np
import torch

from qerl_bench.engine.base import Completion, Sampling
from qerl_bench.engine.decode_buffers import Buffers
from qerl_bench.engine.decoder_blocks import Block
from qerl_bench.engine.rollout_queue import Request, RolloutQueue, SharedPrompt, pages_of, reading_chunks
from qerl_bench.model.packing import Packing
from qerl_core.process.progress import bar
from qerl_kernels.decoder_layer import PAGE
from qerl_kernels.decoder_layer_reference import in_order
from qerl_kernels.row_fields import DONE, DRAWN, FIELDS, KEY, LENGTH, PLACE, PREFIX, TOKEN
from qerl_kernels.rows import advance, advance_reference
from qerl_kernels.sampling import draw, draw_seeded, uniforms
from qerl_kernels.scratch import owned_by

CHECK_STOP_EVERY = 16  # tokens between two checks of which rows are done; each makes the host wait for the GPU


class Decoding:
    """One rollout: its requests, the rows that they have of `buffers`, and the step that draws a token for each row.

    Make and run it inside `adapters_cast_to`.
    """

    def __init__(self, buffers: Buffers, requests: list[Request], sampling: Sampling, keys: list[int]) -> None:
        """Take up the policy as it is now, record the steps that are not recorded yet, and queue `requests`."""
        self.buffers, self.policy, self.limits = buffers, buffers.policy, buffers.limits
        self.sampling, self.keys, self.samples = sampling, keys, len(keys) // (requests[-1].prompt.index + 1)
        self.queue = RolloutQueue(requests, buffers.size.rows, buffers.size.pages)
        together = self.samples > 1 or self.limits.invariant  # one sample of each prompt shares with no other
        self.shares = together and any(request.prompt.whole_pages > 0 for request in requests)
        self.rows_computed, self.changed = 0, False
        buffers.refresh()
        self._upload()
        if self.limits.invariant or len(requests) > buffers.small_batch:  # invariant: empty rows are computed too
            buffers.dequantize()
        started = time.perf_counter()
        if buffers.uses_graph:
            self._record()
        self.recording_s = time.perf_counter() - started

    def run(self) -> Iterator[tuple[int, Completion]]:
        """Decode all requests; yields the number of each with its completion, as they end."""
        queue = self.queue
        yield from self._admit()
        while queue.batch:
            steps = queue.steps(CHECK_STOP_EVERY)
            if queue.grow(steps) or self.changed:
                self._upload()
            size = min(size for size in self.buffers.sizes if size >= len(queue.batch))
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
                if self.buffers.numbers is not None:
                    numbers = uniforms([self.keys[request.index]], request.limit)[0]
                    self.buffers.numbers[request.place, : request.limit] = torch.from_numpy(numbers)
            yield from self._retire()

    def _poll_rows(self) -> None:
        """Learn from the device where every row is."""
        state = self.buffers.state[:, : len(self.queue.batch)].tolist()
        for request, token, drawn, done in zip(self.queue.batch, state[TOKEN], state[DRAWN], state[DONE], strict=True):
            request.token, request.drawn, request.done = token, drawn, bool(done)

    def _retire(self) -> Iterator[tuple[int, Completion]]:
        """Take the requests that are done out of the batch, and yield them."""
        finished = self.queue.retire()
        if not finished:
            return
        self.changed = True
        places = torch.tensor([request.place for request in finished], device=self.buffers.state.device)
        width = max(request.drawn for request in finished)
        columns = [result[places, :width].tolist() for result in self.buffers.results]
        for request, *drawn in zip(finished, *columns, strict=True):
            for column, first in zip(drawn, request.prompt.first[request.sample], strict=True):
                column[0] = first
                del column[request.drawn :]
            yield request.index, (drawn[0], drawn[1], drawn[2])

    def _upload(self) -> None:
        """Write the batch to the device."""
        buffers, batch, self.changed = self.buffers, self.queue.batch, False
        rows = buffers.size.rows
        idle = {"done": 1, "place": rows}
        state = np.tile(np.array([[idle.get(name, 0)] for name in FIELDS]), rows)
        table = np.zeros(buffers.table.shape, dtype=np.int32)
        clusters = np.full(buffers.clusters.shape, -1, dtype=np.int32)
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
        for buffer, new in ((buffers.state, state), (buffers.table, table), (buffers.clusters, clusters)):
            buffer.copy_(torch.from_numpy(new))

    def _column(self, request: Request) -> tuple[int, ...]:
        """What the device has to know of a request, in the order of FIELDS."""
        known = (request.token, request.length, request.drawn, request.done, request.limit, request.stops)
        prefix = request.prompt.whole_pages * PAGE if self.shares else 0
        return (*known, request.place, prefix, self.keys[request.index])

    # --- on the device ------------------------------------------------------------------------------------------------

    def _record(self) -> None:
        """Record the step of every size that this rollout may use. Meanwhile all rows are idle."""
        buffers, sampling = self.buffers, self.sampling
        keys = {size: (size, self.shares, sampling.temperature, sampling.top_p) for size in buffers.sizes}
        copies = buffers.dequantized
        reads_copies = copies.made or not copies.layers  # as later recordings of many rows will
        most = buffers.max_captured if reads_copies else min(buffers.small_batch, buffers.max_captured)
        missing = [size for size in buffers.sizes if keys[size] not in buffers.graphs and size <= most]
        for size in bar(missing, "recording") if missing else ():
            self._step(size)  # compiles and allocates what a capture needs
            before, graph = torch.cuda.memory_reserved(buffers.state.device), torch.cuda.CUDAGraph()
            stream = torch.cuda.current_stream(buffers.state.device)
            with torch.cuda.graph(graph, pool=buffers.pool, stream=stream):
                self._step(size)
            buffers.graph_bytes += max(0, torch.cuda.memory_reserved(buffers.state.device) - before)
            buffers.graphs[keys[size]] = graph

    def _advance(self, size: int) -> None:
        """Draw one more token for each of the first `size` rows."""
        graph = self.buffers.graphs.get((size, self.shares, self.sampling.temperature, self.sampling.top_p))
        if graph is None:
            self._step(size)
        else:
            graph.replay()

    def _step(self, size: int) -> None:
        buffers, sampling = self.buffers, self.sampling
        state = buffers.state[:, :size]
        table, clusters = buffers.table[:size], buffers.clusters[:size] if self.shares else None
        lengths, prefixes = state[LENGTH], state[PREFIX]

        def attend(block: Block, q: torch.Tensor) -> torch.Tensor:
            scaling = block.module.self_attn.scaling
            where = (table, lengths, prefixes, clusters)
            return buffers.ops.attend(q, block.keys, block.values, *where, scaling, block.window)

        rounding = self.policy.rounding
        with owned_by(buffers), nullcontext() if rounding is None else rounding.skipping(state[DONE]):
            logits = self.policy.head(buffers.hidden(state[TOKEN], lengths, table, attend))
            if buffers.numbers is None:
                drawn = draw_seeded(logits, sampling.temperature, state[KEY], state[DRAWN], top_p=sampling.top_p)
                advance(buffers.state, drawn, buffers.stop_ids, buffers.results)
            else:
                numbers = buffers.numbers[state[PLACE], state[DRAWN]]
                drawn = draw(logits, sampling.temperature, numbers, top_p=sampling.top_p)
                advance_reference(buffers.state, drawn, buffers.stop_ids, buffers.results)

    def _read(self, prompts: list[SharedPrompt]) -> None:
        """Store keys and values of `prompts`, in one row without padding, and draw the first token of each sample."""
        buffers, device = self.buffers, self.buffers.state.device
        lengths = [len(prompt.ids) for prompt in prompts]
        width = max(lengths)
        last = torch.arange(width) == torch.tensor(lengths)[:, None] - 1  # (P, width) the last token of each prompt
        packing = Packing.from_mask(last).to(device)
        tokens = torch.tensor([token for prompt in prompts for token in prompt.ids], device=device)
        columns = buffers.size.columns
        pages = [prompt.pages + [0] * (columns - len(prompt.pages)) for prompt in prompts]
        table = torch.tensor(pages, dtype=torch.int32, device=device)

        def attend(block: Block, q: torch.Tensor) -> torch.Tensor:
            keys, values = (in_order(x, table[:, : pages_of(width)])[:, :, :width] for x in (block.keys, block.values))
            scaling = block.module.self_attn.scaling
            mixed = _causal(packing.unpack(q).transpose(1, 2), keys, values, scaling, block.window)
            return packing.pack(mixed.transpose(1, 2)).flatten(1)

        hidden = buffers.hidden(tokens, packing.positions, table[packing.indices // width], attend)
        logits = self.policy.head(hidden[packing.places])
        for start in range(0, len(prompts) * self.samples, buffers.size.rows):
            stop = min(start + buffers.size.rows, len(prompts) * self.samples)
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
        if self.buffers.numbers is None:
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
            source, target = torch.tensor(pairs, device=self.buffers.state.device).t()
            for cache in (cache for pair in self.buffers.caches for cache in pair):
                cache[target] = cache[source]


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
