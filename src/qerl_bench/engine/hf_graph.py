"""engine=hf on a GPU: one decoding step as a CUDA graph over buffers of fixed size.

Launching the kernels of a step one by one takes several times as long as running them. Here all buffers keep their
address for a whole chunk and everything that changes is read on the GPU, so the step is captured once and replayed for
each token; the host only checks every few tokens which requests are done. A graph is dropped at the end of its chunk,
since adapter and noise cannot change within one. The step is written out for the models in `FAMILIES`, with one kernel
for each operation between the matmuls (`qerl_kernels.decoder_layer`); experts run as the model's own module. Left out:
keeping graphs for later chunks, which would hold their memory during training, and a shorter cache for layers that see
a window only.

A *chunk* is the requests that are sampled together (hf.py). A *slot* is one token position of the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from qerl_bench.checks import ConfigError
from qerl_bench.engine.base import Sampling
from qerl_bench.engine.hf_reference import Completion, StopCondition, prefill, to_completions
from qerl_bench.model.kernels import adapters_cast_to, fuse_linears
from qerl_bench.model.lm_head import decoder_of
from qerl_bench.model.policy import Policy
from qerl_bench.quant.linear import PackedLinear
from qerl_kernels import decoder_layer as fused_operations
from qerl_kernels import decoder_layer_reference, grouped
from qerl_kernels.sampling import draw, draw_seeded, uniforms


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
CACHE_ALIGNMENT = 64  # the number of slots is a multiple of this: Triton recompiles for other divisibilities
MIN_TOKENS_TO_RECAPTURE = 64  # shrink the batch and capture a new graph only if at least this many tokens are left


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
) -> list[Completion]:
    """The same as `hf_reference.decode`, up to rounding. On a CPU the step runs without a graph."""
    with adapters_cast_to(policy.model, policy.model.dtype):
        decoding = Decoding(policy, prompt_ids, sampling, keys, lengths)
        if policy.device.type != "cuda":
            return decoding.run()
        side, current = _stream(policy.device), torch.cuda.current_stream(policy.device)
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                return decoding.run()
        finally:
            current.wait_stream(side)  # before the buffers are freed


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of all captures: kernels keep work space for each stream they have run on."""
    return torch.cuda.Stream(device)


class Block(NamedTuple):
    """A transformer block, and what its part of the step needs besides its weights."""

    module: Any
    qkv: Any
    gate_up: Any  # None if the MLP runs as the module it is
    keys: torch.Tensor  # (N, KV, S, D)
    values: torch.Tensor
    cos: torch.Tensor  # (S, D)
    sin: torch.Tensor
    window: int | None  # how many slots a query sees; None: all


class Decoding:
    """One chunk: its buffers, and the step that reads and writes them.

    Row i of the batch belongs to request `rows[i]`; the first `size` rows are decoded. All prompts end at slot W - 1 of
    the cache, so a step writes the same slot for all rows; row i starts at slot `starts[i]`. A finished row continues
    to draw tokens until it leaves the batch; they are cut off at the end. Rows that only pad the batch belong to
    request `count` and write to the last row of the results.
    """

    def __init__(
        self,
        policy: Policy,
        prompt_ids: list[list[int]],
        sampling: Sampling,
        keys: list[int],
        lengths: Sequence[int | None] | None,
    ) -> None:
        device, count, max_tokens = policy.device, len(keys), sampling.max_tokens
        self.policy, self.sampling, self.uses_graph = policy, sampling, device.type == "cuda"
        self.stop = StopCondition(policy, sampling, count, lengths)
        self.ops = fused_operations if policy.fused else decoder_layer_reference
        read = prefill(policy, prompt_ids)
        samples = count // len(prompt_ids)
        width = read.mask.shape[1]
        slots = -(-(width + max_tokens) // CACHE_ALIGNMENT) * CACHE_ALIGNMENT  # S
        try:
            self.caches = [
                _expand_cache(layer, samples, width, slots) for layer in read.cache.layers
            ]  # keys, values (N, KV, S, D)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the GPU has no room for the KV cache of {count} sequences of up to {slots} tokens, which engine=hf "
                "samples at once; make engine.max_num_seqs smaller, or the completion limit"
            ) from error
        self.decoder: Any = decoder_of(policy.model)
        config = self.decoder.config
        self.norms = FAMILIES[config.model_type]
        self.activation = getattr(self.ops, ACTIVATIONS[str(activation_of(config))])
        windows = [getattr(layer, "sliding_window", None) for layer in read.cache.layers]
        self.blocks = _blocks(self.decoder, self.caches, windows)
        self.starts = (width - read.mask.sum(1)).repeat_interleave(samples)  # (N,)
        self.count, self.size = count, count
        self.rows = torch.arange(count, device=device)
        self.token = torch.zeros(count, dtype=torch.long, device=device)
        clock = torch.tensor([0, width - 1], device=device)
        self.clock, self.drawn, self.slot = clock, clock[:1], clock[1:]  # tokens drawn, slot of the latest one
        self.ids = torch.full((count + 1, max_tokens), -1, dtype=torch.long, device=device)
        self.logprobs, self.entropies = (torch.zeros(count + 1, max_tokens, device=device) for _ in range(2))
        self.keys = torch.tensor([*keys, 0], device=device)
        self.numbers = None if policy.fused else torch.from_numpy(uniforms([*keys, 0], max_tokens)).to(device)
        packed_experts = any(hasattr(experts, "can_be_captured") for experts in _experts(self.decoder))
        self.max_captured = grouped.MAX_TOKENS if packed_experts else count  # rows: with more, experts ask the host
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm = False  # whether a step of this size has run, which compiles and allocates what a capture needs
        self._draw(read.logits.repeat_interleave(samples, 0))

    def run(self) -> list[Completion]:
        """Decode all completions of the chunk."""
        drawn, max_length = 1, self.stop.max_length
        while drawn < max_length:
            num_steps = min(CHECK_STOP_EVERY, max_length - drawn)
            for _ in range(num_steps):
                self._advance()
            drawn += num_steps
            rows = self.rows[: self.size]
            real = (rows < self.count).nonzero()[:, 0]  # not padding
            alive = real[~self.stop.is_done(drawn, self.ids[rows[real], :drawn], rows[real])]
            if len(alive) == 0:
                break
            worth_recapturing = not self.uses_graph or max_length - drawn >= MIN_TOKENS_TO_RECAPTURE
            if len(alive) <= self.size // 2 and worth_recapturing:
                self._shrink(alive)
        ids = self.ids[: self.count]
        return to_completions(self.stop.lengths(ids), ids, self.logprobs[: self.count], self.entropies[: self.count])

    def _advance(self) -> None:
        """Draw one more token for each row."""
        if self.uses_graph and self.warm and self.graph is None and self.size <= self.max_captured:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream(self.rows.device)):
                self._step()
        if self.graph is None:
            self._step()
            self.warm = True
        else:
            self.graph.replay()

    def _step(self) -> None:
        self._draw(self._logits())

    def _logits(self) -> torch.Tensor:
        """The logits (size, V) after the latest tokens: the model's forward pass, written out layer by layer."""
        ops, names, size, starts = self.ops, self.norms, self.size, self.starts[: self.size]
        epsilon = self.decoder.config.rms_norm_eps

        def add_norm(
            norm: Any, x: torch.Tensor, delta: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return ops.add_norm(x, delta, norm.weight, epsilon, names.unit_offset)

        def normed(norm: Any, x: torch.Tensor) -> torch.Tensor:  # x (size, heads * width of the norm)
            return add_norm(norm, x.reshape(-1, len(norm.weight)))[1].view(x.shape)

        x, delta = self.decoder.embed_tokens(self.token[:size]), None  # (size, H)
        for block in self.blocks:
            module, attention, mlp = block.module, block.module.self_attn, block.module.mlp
            x, h = add_norm(getattr(module, names.before_attention), x, delta)
            q, k, v = block.qkv(h)
            if hasattr(attention, "q_norm"):
                q, k = normed(attention.q_norm, q), normed(attention.k_norm, k)
            q = ops.rotate_store(q, k, v, block.cos, block.sin, starts, self.slot, block.keys, block.values)
            attended = ops.attend(q, block.keys, block.values, starts, self.slot, attention.scaling, block.window)
            delta = attention.o_proj(attended)
            if names.after_attention is not None:
                delta = normed(getattr(module, names.after_attention), delta)
            x, h = add_norm(getattr(module, names.before_mlp), x, delta)
            delta = mlp(h[None])[0] if block.gate_up is None else mlp.down_proj(self.activation(*block.gate_up(h)))
            if names.after_mlp is not None:
                delta = normed(getattr(module, names.after_mlp), delta)
        return self.policy.head(add_norm(self.decoder.norm, x, delta)[1])

    def _draw(self, logits: torch.Tensor) -> None:
        """Draw the next token of each row, store it with its log-probability and entropy, and advance the clock."""
        sampling, rows = self.sampling, self.rows[: self.size]
        if self.numbers is None:
            drawn = draw_seeded(logits, sampling.temperature, self.keys[rows], self.drawn, top_p=sampling.top_p)
        else:
            drawn = draw(logits, sampling.temperature, self.numbers[rows, self.drawn], top_p=sampling.top_p)
        for results, column in zip((self.ids, self.logprobs, self.entropies), drawn, strict=True):
            results[rows, self.drawn] = column
        self.token[: self.size] = drawn[0]
        self.clock += 1

    def _shrink(self, alive: torch.Tensor) -> None:
        """Move the rows `alive` to the front and continue with half, a quarter, ... of the batch."""
        size = self.size
        while len(alive) <= size // 2:
            size //= 2
        chosen = torch.cat([alive, alive[:1].expand(size - len(alive))])
        for buffer in (*(tensor for pair in self.caches for tensor in pair), self.starts, self.token, self.rows):
            buffer[:size] = buffer[chosen]
        self.rows[len(alive) : size] = self.count
        self.size, self.graph, self.warm = size, None, False


def _blocks(decoder: Any, caches: list[tuple[torch.Tensor, torch.Tensor]], windows: list[int | None]) -> list[Block]:
    """The blocks of `decoder`. Call this inside `adapters_cast_to`."""
    config = decoder.config
    first = caches[0][0]
    positions = torch.arange(first.shape[2], device=first.device)[None]
    tables = {kind: decoder.rotary_emb(first, positions, *([kind] if kind else [])) for kind in ropes_of(config)}
    kinds = [None] * len(windows) if None in tables else config.layer_types
    blocks = []
    for module, kind, (keys, values), window in zip(decoder.layers, kinds, caches, windows, strict=True):
        attention, mlp = module.self_attn, module.mlp
        qkv = fuse_linears([attention.q_proj, attention.k_proj, attention.v_proj])
        gate_up = fuse_linears([mlp.gate_proj, mlp.up_proj]) if hasattr(mlp, "gate_proj") else None
        cos, sin = tables[kind]
        blocks.append(Block(module, qkv, gate_up, keys, values, cos[0], sin[0], window))
    return blocks


def _expand_cache(layer: object, samples: int, width: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of a layer, (P, KV, W, D), repeated per sample and extended to `slots` slots.

    They are those of the last of `width` slots: a layer that sees a window keeps no others.
    """
    expanded = []
    for name in ("keys", "values"):
        prefilled = getattr(layer, name)
        setattr(layer, name, None)
        prompts, heads, kept, size = prefilled.shape
        buffer = prefilled.new_zeros(prompts, samples, heads, slots, size)
        buffer[:, :, :, width - kept : width] = prefilled[:, None]
        expanded.append(buffer.flatten(0, 1))
    return expanded[0], expanded[1]
