"""engine=hf on a GPU: the step from one token to the next as a CUDA graph over buffers of fixed size.

Launched one by one, the kernels of a step take several times as long to start as to run. Here every buffer stays where
it is for a whole round and all that changes is read on the GPU, so the step is recorded once and replayed for each
token, and the host looks only now and then at who is done. A recording lives no longer than its round, within which
neither adapter nor noise can change. The step is written out for models built as Llama is, with the operations between
the matmuls in one kernel each (`qerl_kernels.step`). Left out: graphs kept for later rounds, which would hold their
memory while the model trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from qerl_bench.checks import ConfigError
from qerl_bench.engine.base import Sampling
from qerl_bench.engine.hf import Completion, Ends, completions, read_prompts
from qerl_bench.model.kernels import adapters_cast_to, fuse_linears
from qerl_bench.model.policy import Policy
from qerl_bench.quant.linear import PackedLinear
from qerl_kernels import step as fused_operations
from qerl_kernels import step_reference
from qerl_kernels.sampling import draw, draw_seeded, uniforms

MODELS = ("llama", "qwen2", "qwen3")
LOOK_EVERY = 16  # tokens between two looks at which rows are done; each makes the host wait for the GPU
STRIDE = 64  # that the number of slots is a multiple of: what divides it goes into the kernels, which compile again
PAYS = 64  # tokens still to come for which a smaller batch is worth another recording


def eager_reason(policy: Policy) -> str | None:
    """Why `policy` is sampled step by step through transformers, or None if it is sampled here."""
    config = policy.model.config
    if not policy.fused:
        return "without fused kernels sampling is the reference"
    if config.model_type not in MODELS or config.hidden_act != "silu":
        return f"the recorded step knows {', '.join(MODELS)} with SiLU, not {config.model_type}"
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
    """What `hf.decode` returns, up to rounding. On a CPU nothing is recorded: the same step, as it is."""
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
            current.wait_stream(side)  # before it gets the buffers back


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of every recording: kernels keep work space for each stream that they have seen."""
    return torch.cuda.Stream(device)


class Decoding:
    """One round: its buffers, and the step that reads and writes them.

    Rows of a batch are those of `rows`; the first `size` of them are at work. Prompts end at slot W - 1 of the cache,
    so a step writes one slot for all rows; row i begins at slot `starts[i]`. A row that is done goes on drawing until
    it leaves the batch, and what follows its end is cut off. Row `count` of the results takes what
    is drawn to fill up a batch.
    """

    def __init__(
        self,
        policy: Policy,
        prompt_ids: list[list[int]],
        sampling: Sampling,
        keys: list[int],
        lengths: Sequence[int | None] | None,
    ) -> None:
        device, count, most = policy.device, len(keys), sampling.max_tokens
        self.policy, self.sampling, self.records = policy, sampling, device.type == "cuda"
        self.ends = Ends(policy, sampling, count, lengths)
        self.operations = fused_operations if policy.fused else step_reference
        read = read_prompts(policy, prompt_ids)
        samples = count // len(prompt_ids)
        width = read.mask.shape[1]
        slots = -(-(width + most) // STRIDE) * STRIDE  # S
        try:
            self.caches = [_widened(layer, samples, slots) for layer in read.cache.layers]  # keys, values (N, KV, S, D)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the GPU has no room for keys and values of {count} sequences of up to {slots} tokens, which "
                "engine=hf samples side by side; make engine.max_num_seqs smaller, or the limit on completions"
            ) from error
        blocks = policy.model.model.layers
        self.qkv = [fuse_linears([b.self_attn.q_proj, b.self_attn.k_proj, b.self_attn.v_proj]) for b in blocks]
        self.gate_up = [fuse_linears([b.mlp.gate_proj, b.mlp.up_proj]) for b in blocks]
        places = torch.arange(slots, device=device)[None]
        cos, sin = policy.model.model.rotary_emb(self.caches[0][0], places)
        self.cos, self.sin = cos[0], sin[0]  # (S, D)
        self.starts = (width - read.mask.sum(1)).repeat_interleave(samples)  # (N,)
        self.count, self.size = count, count
        self.rows = torch.arange(count, device=device)
        self.token = torch.zeros(count, dtype=torch.long, device=device)
        clock = torch.tensor([0, width - 1], device=device)
        self.clock, self.drawn, self.slot = clock, clock[:1], clock[1:]  # tokens drawn, slot of the latest
        self.ids = torch.full((count + 1, most), -1, dtype=torch.long, device=device)
        self.logprobs, self.entropies = (torch.zeros(count + 1, most, device=device) for _ in range(2))
        self.keys = torch.tensor([*keys, 0], device=device)
        self.numbers = None if policy.fused else torch.from_numpy(uniforms([*keys, 0], most)).to(device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm = False  # whether a step of this size has run, which compiles and allocates what a recording needs
        self._draw(read.logits.repeat_interleave(samples, 0))

    def run(self) -> list[Completion]:
        """All tokens of the round."""
        done, most = 1, self.ends.most
        while done < most:
            stretch = min(LOOK_EVERY, most - done)
            for _ in range(stretch):
                self._advance()
            done += stretch
            rows = self.rows[: self.size]
            working = (rows < self.count).nonzero()[:, 0]
            going = working[~self.ends.at(done, self.ids[rows[working], :done], rows[working])]
            if len(going) == 0:
                break
            if len(going) <= self.size // 2 and (not self.records or most - done >= PAYS):
                self._shrink(going)
        ids = self.ids[: self.count]
        return completions(self.ends.lengths(ids), ids, self.logprobs[: self.count], self.entropies[: self.count])

    def _advance(self) -> None:
        """One more token of each row at work."""
        if self.records and self.warm and self.graph is None:
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
        """The forward pass (size, V) of the latest tokens, as the modules compute it, layer by layer."""
        do, model, size = self.operations, self.policy.model, self.size
        starts = self.starts[:size]

        def normed(norm: Any, x: torch.Tensor, delta: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            return do.add_norm(x, delta, norm.weight, norm.variance_epsilon)

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
            q = do.rotate_store(q, k, v, self.cos, self.sin, starts, self.slot, keys, values)
            delta = block.o_proj(do.attend(q, keys, values, starts, self.slot, block.scaling))
            x, h = normed(layer.post_attention_layernorm, x, delta)
            delta = layer.mlp.down_proj(do.swiglu(*gate_up(h)))
        return model.lm_head(normed(model.model.norm, x, delta)[1])

    def _draw(self, logits: torch.Tensor) -> None:
        """Draw the next token of each row, write down what is said about it, and move on by one place."""
        sampling, rows = self.sampling, self.rows[: self.size]
        if self.numbers is None:
            drawn = draw_seeded(logits, sampling.temperature, self.keys[rows], self.drawn, top_p=sampling.top_p)
        else:
            drawn = draw(logits, sampling.temperature, self.numbers[rows, self.drawn], top_p=sampling.top_p)
        for results, column in zip((self.ids, self.logprobs, self.entropies), drawn, strict=True):
            results[rows, self.drawn] = column
        self.token[: self.size] = drawn[0]
        self.clock += 1

    def _shrink(self, going: torch.Tensor) -> None:
        """Move the rows `going` to the front and go on with half, a quarter, ... of the batch."""
        size = self.size
        while len(going) <= size // 2:
            size //= 2
        chosen = torch.cat([going, going[:1].expand(size - len(going))])
        for buffer in (*(tensor for pair in self.caches for tensor in pair), self.starts, self.token, self.rows):
            buffer[:size] = buffer[chosen]
        self.rows[len(going) : size] = self.count
        self.size, self.graph, self.warm = size, None, False


def _widened(layer: object, samples: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that a layer of transformers' cache has read, each (P, KV, W, D), in caches of `slots` slots."""
    wide = []
    for name in ("keys", "values"):
        read = getattr(layer, name)
        setattr(layer, name, None)
        prompts, heads, width, size = read.shape
        buffer = read.new_zeros(prompts, samples, heads, slots, size)
        buffer[:, :, :, :width] = read[:, None]
        wide.append(buffer.flatten(0, 1))
    return wide[0], wide[1]
