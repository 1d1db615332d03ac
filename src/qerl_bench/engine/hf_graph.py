"""engine=hf on a GPU: one decoding step as a CUDA graph over rows that a queue refills.

Launching the kernels of a step one by one takes several times as long as running them. Here all buffers keep their
address and everything that changes is read on the GPU, so the step is captured once for each size of the batch and
replayed for each token. Every few tokens the host looks which rows are done, gives them to the next requests
(rollout_queue.py) and reads the prompts of these. Adapters and norm scales are copied to fixed places, so graphs also
serve later rollouts. The forward pass is written out for the models in `FAMILIES`, with one kernel for each operation
between the matmuls (`qerl_kernels.decoder_layer`); experts run as the model's own module.

With `limits.invariant` the batch has one size, prompts are read one by one, and attention sums in pieces that depend on
the row alone (`decoder_layer`): no matmul changes its shape with the company that a request has. Left out: fewer pages
for layers that see a window only, and reading a long prompt in parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from peft.tuners.lora import LoraLayer
from transformers import DynamicCache

from qerl_bench.checks import ConfigError
from qerl_bench.engine.base import Sampling
from qerl_bench.engine.hf_reference import Completion
from qerl_bench.engine.rollout_queue import (
    Limits,
    Request,
    RolloutQueue,
    SharedPrompt,
    buckets,
    least_pages,
    most_pages,
    pages_of,
    reading_chunks,
)
from qerl_bench.model.adapters import LoRAExperts
from qerl_bench.model.kernels import FusedLinears, LoRALinear, adapters_cast_to, fuse_linears
from qerl_bench.model.lm_head import decoder_of
from qerl_bench.model.packing import Packing
from qerl_bench.model.policy import Policy
from qerl_bench.progress import bar
from qerl_bench.quant.linear import PackedLinear
from qerl_kernels import decoder_layer as fused_operations
from qerl_kernels import decoder_layer_reference, grouped
from qerl_kernels.decoder_layer import PAGE, cluster_size
from qerl_kernels.decoder_layer_reference import in_order
from qerl_kernels.rows import DONE, DRAWN, FIELDS, KEY, LENGTH, PLACE, PREFIX, TOKEN, advance, advance_reference
from qerl_kernels.sampling import draw, draw_seeded, uniforms
from qerl_kernels.scratch import owned_by


@dataclass(frozen=True)
class BlockNorms:
    """The norms of a block by name: before and after attention and MLP. Norms of queries and keys have one name."""

    before_attention: str
    after_attention: str | None
    before_mlp: str
    after_mlp: str | None
    unit_offset: bool  # they multiply by 1 + weight


LLAMA = BlockNorms("input_layernorm", None, "post_attention_layernorm", None, unit_offset=False)
GEMMA = BlockNorms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    unit_offset=True,
)
FAMILIES = {  # by the model type of the text decoder
    **dict.fromkeys(("llama", "mistral", "ministral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "seed_oss"), LLAMA),
    "gemma3_text": GEMMA,
}
ACTIVATIONS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}  # in qerl_kernels.decoder_layer
CHECK_STOP_EVERY = 16  # tokens between two checks of which rows are done; each makes the host wait for the GPU
FREE_SHARE = 0.8  # of the GPU's free memory that keys and values may take; prompts and graphs need the rest


def eager_reason(policy: Policy) -> str | None:
    """Why `policy` must be decoded through transformers (hf_reference.py); None if it can be decoded here."""
    config: Any = decoder_of(policy.model).config
    if not policy.fused:
        return "without fused kernels sampling is the reference"
    if config.model_type not in FAMILIES or activation_of(config) not in ACTIVATIONS:
        return f"the captured step is not written for {config.model_type} with {activation_of(config)}"
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        return "the model has layers without full attention or a sliding window"
    if {rope["rope_type"] for rope in ropes_of(config).values()} & {"dynamic", "longrope"}:
        return "the rotary frequencies depend on the length"
    if not all(_can_be_captured(experts, config) for experts in _experts(decoder_of(policy.model))):
        return "the experts' module makes the host wait for the GPU"
    if any(isinstance(layer, PackedLinear) and layer.kernel_weight is None for layer in policy.model.modules()):
        return "a packed layer runs the reference"
    return None


def activation_of(config: Any) -> str | None:
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)


def ropes_of(config: Any) -> dict[str | None, dict[str, Any]]:
    """The parameters of the rotary embedding by type of layer; under None if all layers have the same."""
    parameters = config.rope_parameters
    return {None: parameters} if "rope_type" in parameters else parameters


def _experts(decoder: Any) -> list[Any]:
    return [layer.mlp.experts for layer in decoder.layers if hasattr(layer.mlp, "experts")]


def _can_be_captured(experts: Any, config: Any) -> bool:
    """Whether a module of experts runs without a word from the GPU to the host. Packed experts say so themselves."""
    if any(parameter.ndim == 3 for parameter in experts.parameters(recurse=False)):
        return config._experts_implementation in ("grouped_mm", "batched_mm")
    return getattr(experts, "can_be_captured", False)


def decode(
    policy: Policy,
    prompt_ids: list[list[int]],
    sampling: Sampling,
    keys: list[int],
    lengths: Sequence[int | None] | None = None,
    limits: Limits | None = None,
) -> list[Completion]:
    """The same as `hf_reference.decode`, up to rounding. On a CPU the step runs without a graph."""
    sampler = Sampler(policy, limits or Limits(rows=len(keys)))
    try:
        return sampler.decode(prompt_ids, sampling, keys, lengths)
    finally:
        sampler.release()


class Sampler:
    """Decodes for one policy. Buffers and graphs stay until `release`, or until `sleep` finds them too large."""

    def __init__(self, policy: Policy, limits: Limits) -> None:
        self.policy, self.limits = policy, limits
        self.kept: Decoding | None = None
        self.report: dict[str, float] = {}

    def decode(
        self,
        prompt_ids: list[list[int]],
        sampling: Sampling,
        keys: list[int],
        lengths: Sequence[int | None] | None = None,
    ) -> list[Completion]:
        """As `hf_reference.decode`. Whatever ends it early, the next call starts with new buffers."""
        try:
            with adapters_cast_to(self.policy.model, self.policy.model.dtype), _side_stream(self.policy.device):
                return self._decode(_requests(prompt_ids, sampling, len(keys), lengths), sampling, keys)
        except BaseException:
            self.release()
            raise

    def _decode(self, requests: list[Request], sampling: Sampling, keys: list[int]) -> list[Completion]:
        if not requests:
            return []
        size = self._size(requests)
        if self.kept is None or not self.kept.fits(size):
            self.release()  # first, so that its memory can be used again
            self.kept = Decoding(self.policy, self.limits, size)
        decoding = self.kept
        decoding.start(requests, sampling, keys)
        ended = decoding.run()
        if len(requests) > self.limits.rows:
            ended = bar(ended, "sampling", total=len(requests))
        completions = dict(ended)
        self._note(decoding)
        return [completions[index] for index in range(len(requests))]

    def sleep(self) -> dict[str, float]:
        """Release what takes more than `kept_gib`. Returns the metrics of all calls since the last sleep."""
        if self.kept is not None and self.kept.kept_bytes > self.limits.kept_gib * 2**30:
            self.release()
        report, self.report = self.report, {}
        return report

    def release(self) -> None:
        """Free all buffers and graphs."""
        self.kept = None

    def record(self) -> dict[str, Any]:
        """How it samples, for engine.json."""
        limits = self.limits
        return {
            "page_tokens": PAGE,
            "kv_bytes_per_token": kv_bytes(self.policy),
            "cache_gib": f"{FREE_SHARE} of the free memory" if limits.cache_gib is None else limits.cache_gib,
            "kept_gib": limits.kept_gib,
            "prefill_tokens": "one prompt" if limits.invariant else limits.prefill_tokens,
            "recorded_rows": [limits.rows] if limits.invariant else buckets(limits.rows)[::-1],
        }

    def _size(self, requests: list[Request]) -> Size:
        rows = self.limits.rows if self.limits.invariant else min(self.limits.rows, len(requests))
        longest = max(len(request.prompt.ids) + request.limit for request in requests)
        pages, least = most_pages(requests, rows), 1 + max(map(least_pages, requests))
        page_bytes = PAGE * kv_bytes(self.policy)
        if self.limits.cache_gib is not None:
            pages = min(pages, int(self.limits.cache_gib * 2**30 / page_bytes))
        elif self.policy.device.type == "cuda":
            free = _free_bytes(self.policy.device) + (self.kept.cache_bytes if self.kept is not None else 0)
            pages = max(least, min(pages, int(FREE_SHARE * free / page_bytes)))
        tokens = max(request.limit for request in requests)
        return Size(rows=rows, pages=pages, least_pages=least, columns=pages_of(longest), tokens=tokens)

    def _note(self, decoding: Decoding) -> None:
        added = {
            "rollout/rows_computed": decoding.rows_computed,
            "rollout/preempted": decoding.queue.preempted,
            "time/recording_s": decoding.recording_s,
        }
        report = {name: self.report.get(name, 0.0) + value for name, value in added.items()}
        used = decoding.cache_bytes * decoding.queue.most_used / decoding.size.pages
        sizes = {"memory/cache_gib": decoding.cache_bytes, "memory/cache_used_gib": used}
        self.report = report | {name: max(self.report.get(name, 0.0), size / 2**30) for name, size in sizes.items()}


def _requests(
    prompt_ids: list[list[int]], sampling: Sampling, count: int, lengths: Sequence[int | None] | None
) -> list[Request]:
    samples = count // max(1, len(prompt_ids))
    prompts = [SharedPrompt(index=i, ids=ids, unfinished=samples) for i, ids in enumerate(prompt_ids)]
    return [
        Request(
            index=index,
            sample=index % samples,
            prompt=prompts[index // samples],
            limit=sampling.max_tokens if length is None else length,
            stops=length is None,
        )
        for index, length in enumerate(lengths or [None] * count)
    ]


def kv_bytes(policy: Policy) -> int:
    """Bytes of the keys and values of one token."""
    config: Any = decoder_of(policy.model).config
    layers = [layer.self_attn.head_dim for layer in _layers(policy)]
    return 2 * config.num_key_value_heads * sum(layers) * policy.model.dtype.itemsize


def _layers(policy: Policy) -> list[Any]:
    decoder: Any = decoder_of(policy.model)
    return list(decoder.layers)


def _free_bytes(device: torch.device) -> int:
    """Bytes that this process can still allocate on the GPU."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """The one stream of all captures: kernels keep work space for each stream they have run on."""
    if device.type != "cuda":
        yield
        return
    side, current = _stream(device), torch.cuda.current_stream(device)
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        current.wait_stream(side)  # before buffers are freed


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, so that what no row has written is finite. From the stream of training, which reuses this memory later."""
    if device.type != "cuda":
        return torch.zeros(shape, dtype=dtype)
    with torch.cuda.stream(torch.cuda.default_stream(device)):
        pages = torch.empty(shape, dtype=dtype, device=device)
    return pages.zero_()


class Size(NamedTuple):
    """What buffers have room for."""

    rows: int
    pages: int
    least_pages: int  # with fewer, some request could never be finished
    columns: int  # pages of one row
    tokens: int  # of one completion


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


class Decoding:
    """Buffers for a batch of up to `size.rows` rows, the step that reads and writes them, and its recordings.

    Row i of the batch is what column i of `state`, row i of `table` and the pages named there say. Rows behind the last
    request compute on page 0 and write to the last row of the results. Make, start and run it inside
    `adapters_cast_to`.
    """

    def __init__(self, policy: Policy, limits: Limits, size: Size) -> None:
        device, dtype = policy.device, policy.model.dtype
        self.policy, self.limits, self.size, self.uses_graph = policy, limits, size, device.type == "cuda"
        self.ops = fused_operations if policy.fused else decoder_layer_reference
        self.decoder: Any = decoder_of(policy.model)
        config = self.decoder.config
        self.norms = FAMILIES[config.model_type]
        self.activation = getattr(self.ops, ACTIVATIONS[str(activation_of(config))])
        self.cache_bytes = size.pages * PAGE * kv_bytes(policy)
        heads = config.num_key_value_heads
        try:
            self.caches = [
                [_pages((size.pages, heads, PAGE, layer.self_attn.head_dim), dtype, device) for _ in "kv"]
                for layer in _layers(policy)
            ]
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the GPU has no room for the keys and values of a rollout: {size.pages} pages of {PAGE} tokens, "
                f"{self.cache_bytes / 2**30:.1f} GiB; make engine.cache_gib smaller, or engine.max_num_seqs"
            ) from error
        self.adapters = [(layer, layer.cast_adapter) for layer in _adapted(policy) if layer.cast_adapter is not None]
        self.blocks = _blocks(policy, self.caches, size.columns * PAGE)
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
        packed_experts = any(hasattr(experts, "can_be_captured") for experts in _experts(self.decoder))
        self.max_captured = grouped.MAX_TOKENS if packed_experts else rows  # rows: with more, experts ask the host
        self.sizes = [rows] if limits.invariant else buckets(rows)
        self.graphs: dict[tuple[int, bool, float, float], torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.uses_graph else None
        self.graph_bytes = 0
        self.baked = self._baked()

    def fits(self, size: Size) -> bool:
        """Whether these buffers serve such a rollout, and recordings still find everything where it was.

        Three quarters of the pages are enough: with fewer of them fewer rows run, but nothing is recorded again.
        """
        mine = self.size
        room = mine.rows >= size.rows and mine.columns >= size.columns and mine.tokens >= size.tokens
        pages = mine.pages >= max(size.least_pages, 3 * size.pages // 4)
        same_rows = mine.rows == size.rows or not self.limits.invariant
        return room and pages and same_rows and self.baked == self._baked()

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
        started = time.perf_counter()
        if self.uses_graph:
            self._record()
        self.recording_s = time.perf_counter() - started

    def run(self) -> Iterator[tuple[int, Completion]]:
        """Decode all requests; yields the number of each with its completion, as they end."""
        queue = self.queue
        yield from self._enter()
        while queue.batch:
            steps = queue.steps(CHECK_STOP_EVERY)
            if queue.grow(steps) or self.changed:
                self._upload()
            size = min(size for size in self.sizes if size >= len(queue.batch))
            for _ in range(steps):
                self._advance(size)
            self.rows_computed += steps * size
            self._look()
            yield from self._leave()
            yield from self._enter()

    def _enter(self) -> Iterator[tuple[int, Completion]]:
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
            yield from self._leave()

    def _look(self) -> None:
        """Learn from the device where every row is."""
        state = self.state[:, : len(self.queue.batch)].tolist()
        for request, token, drawn, done in zip(self.queue.batch, state[TOKEN], state[DRAWN], state[DONE], strict=True):
            request.token, request.drawn, request.done = token, drawn, bool(done)

    def _leave(self) -> Iterator[tuple[int, Completion]]:
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
        missing = [size for size in self.sizes if keys[size] not in self.graphs and size <= self.max_captured]
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

        with owned_by(self):
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

        def normed(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:  # x (n, heads * width of the norm)
            return ops.add_norm(x.reshape(-1, len(scale)), None, scale, epsilon, unit_offset)[1].view(x.shape)

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
            for name, norm in _norms(block.module).items():
                block.scales[name].copy_(norm.weight)
        self.last_scale.copy_(self.decoder.norm.weight)

    def _baked(self) -> tuple[object, ...]:
        """Everything of the policy that is part of a recording: addresses, except of what is copied, and adapters."""
        norms = [norm for layer in _layers(self.policy) for norm in _norms(layer).values()]
        copied = {id(norm.weight) for norm in (*norms, self.decoder.norm)}
        modules = [*self.policy.model.modules()]
        own = [tensors for module in modules for tensors in (module._parameters, module._buffers) if tensors]
        tensors = [tensor for named in own for tensor in named.values() if tensor is not None]
        layers = [module for module in modules if isinstance(module, LoraLayer)]
        adapters = [(layer.disable_adapters, layer.merged, *layer.scaling.values()) for layer in layers]
        cast = [layer.cast_adapter is not None for layer in modules if isinstance(layer, LoRALinear | LoRAExperts)]
        return (*(tensor.data_ptr() for tensor in tensors if id(tensor) not in copied), *adapters, *cast)


def _adapted(policy: Policy) -> list[Any]:
    return [module for module in policy.model.modules() if isinstance(module, LoRALinear | LoRAExperts)]


def _norms(layer: Any) -> dict[str, Any]:
    """The norms of a block by name, also those of queries and keys."""
    attention = layer.self_attn
    found = {name: module for name, module in layer.named_children() if name.endswith("layernorm")}
    return found | {name: getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)}


def _blocks(policy: Policy, caches: list[list[torch.Tensor]], width: int) -> list[Block]:
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
        scales = {name: norm.weight.float().clone() for name, norm in _norms(module).items()}
        cos, sin = (angles[0].contiguous() for angles in tables[kind])
        blocks.append(Block(module, qkv, gate_up, scales, keys, values, cos, sin, window))
    return blocks


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
