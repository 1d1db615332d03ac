"""engine=hf on a GPU: one decoding step as a CUDA graph over buffers of fixed size.

Launching the kernels of a step one by one takes several times as long as running them. Here all buffers keep their
address for a whole chunk and everything that changes is read on the GPU, so the step is captured once and replayed for
each token; the host only checks every few tokens which requests are done. A graph is dropped at the end of its chunk,
since adapter and noise cannot change within one. The step is written out for models with Llama's architecture, with one
kernel for each operation between the matmuls (`qerl_kernels.decoder_layer`). Left out: keeping graphs for later chunks,
which would hold their memory during training.

A *chunk* is the requests that are sampled together (hf.py). A *slot* is one token position of the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from qerl_bench.checks import ConfigError
from qerl_bench.engine.base import Sampling
from qerl_bench.engine.hf_reference import Completion, StopCondition, prefill, to_completions
from qerl_bench.model.kernels import adapters_cast_to, fuse_linears
from qerl_bench.model.policy import Policy
from qerl_bench.quant.linear import PackedLinear
from qerl_kernels import decoder_layer as fused_operations
from qerl_kernels import decoder_layer_reference
from qerl_kernels.sampling import draw, draw_seeded, uniforms

MODELS = ("llama", "qwen2", "qwen3")
CHECK_STOP_EVERY = 16  # tokens between two checks of which rows are done; each makes the host wait for the GPU
CACHE_ALIGNMENT = 64  # the number of slots is a multiple of this: Triton recompiles for other divisibilities
MIN_TOKENS_TO_RECAPTURE = 64  # shrink the batch and capture a new graph only if at least this many tokens are left


def eager_reason(policy: Policy) -> str | None:
    """Why `policy` must be decoded through transformers (hf_reference.py); None if it can be decoded here."""
    config = policy.model.config
    if not policy.fused:
        return "without fused kernels sampling is the reference"
    if config.model_type not in MODELS or config.hidden_act != "silu":
        return f"the captured step supports {', '.join(MODELS)} with SiLU, not {config.model_type}"
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return "the model has layers without full attention"
    if config.rope_parameters["rope_type"] in ("dynamic", "longrope"):
        return "the rotary frequencies depend on the length"
    if any(isinstance(layer, PackedLinear) and layer.kernel_weight is None for layer in policy.model.modules()):
        return "a packed layer runs the reference"
    return None


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
                _expand_cache(layer, samples, slots) for layer in read.cache.layers
            ]  # keys, values (N, KV, S, D)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the GPU has no room for the KV cache of {count} sequences of up to {slots} tokens, which engine=hf "
                "samples at once; make engine.max_num_seqs smaller, or the completion limit"
            ) from error
        blocks = policy.model.model.layers
        self.qkv = [fuse_linears([b.self_attn.q_proj, b.self_attn.k_proj, b.self_attn.v_proj]) for b in blocks]
        self.gate_up = [fuse_linears([b.mlp.gate_proj, b.mlp.up_proj]) for b in blocks]
        positions = torch.arange(slots, device=device)[None]
        cos, sin = policy.model.model.rotary_emb(self.caches[0][0], positions)
        self.cos, self.sin = cos[0], sin[0]  # (S, D)
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
        if self.uses_graph and self.warm and self.graph is None:
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
        ops, model, size = self.ops, self.policy.model, self.size
        starts = self.starts[:size]

        def normed(norm: Any, x: torch.Tensor, delta: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            return ops.add_norm(x, delta, norm.weight, norm.variance_epsilon)

        x, delta = model.model.embed_tokens(self.token[:size]), None  # (size, H)
        parts = zip(model.model.layers, self.caches, self.qkv, self.gate_up, strict=True)
        for layer, (keys, values), qkv, gate_up in parts:
            block = layer.self_attn
            x, h = normed(layer.input_layernorm, x, delta)
            q, k, v = qkv(h)
            if model.config.model_type == "qwen3":
                q, k = (
                    normed(norm, heads.reshape(-1, keys.shape[3]))[1].view(heads.shape)
                    for norm, heads in ((block.q_norm, q), (block.k_norm, k))
                )
            q = ops.rotate_store(q, k, v, self.cos, self.sin, starts, self.slot, keys, values)
            delta = block.o_proj(ops.attend(q, keys, values, starts, self.slot, block.scaling))
            x, h = normed(layer.post_attention_layernorm, x, delta)
            delta = layer.mlp.down_proj(ops.swiglu(*gate_up(h)))
        return model.lm_head(normed(model.model.norm, x, delta)[1])

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


def _expand_cache(layer: object, samples: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The prefilled keys and values of a layer, (P, KV, W, D), repeated per sample and extended to `slots` slots."""
    expanded = []
    for name in ("keys", "values"):
        prefilled = getattr(layer, name)
        setattr(layer, name, None)
        prompts, heads, width, size = prefilled.shape
        buffer = prefilled.new_zeros(prompts, samples, heads, slots, size)
        buffer[:, :, :, :width] = prefilled[:, None]
        expanded.append(buffer.flatten(0, 1))
    return expanded[0], expanded[1]
