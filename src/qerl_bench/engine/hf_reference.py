"""Decoding through transformers: the reference for hf_graph.py, and what engine=hf uses where that cannot run."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from qerl_bench.engine.base import Completion, Sampling
from qerl_bench.model.attention import CACHES
from qerl_bench.model.policy import Policy
from qerl_core.process.progress import within
from qerl_kernels.sampling import draw, draw_seeded, uniforms


class Prefill(NamedTuple):
    """The forward pass over P prompts, left-padded to W tokens."""

    mask: torch.Tensor  # (P, W), 0 at padding
    cache: Any  # a DynamicCache
    position: torch.Tensor  # (P, 1) of the last token
    logits: torch.Tensor  # (P, V) after the last token


def cache_name(policy: Policy) -> str:
    """What the model calls its cache: before transformers 5.24 state-space models have a name of their own."""
    names = inspect.signature(policy.model.forward).parameters
    return next((name for name in CACHES if name in names), "past_key_values")


def cache_of(policy: Policy) -> DynamicCache:
    """An empty cache for the policy's layers."""
    return policy.kv.cache(policy.model.config)


def holds_states_alone(cache: DynamicCache) -> bool:
    """Whether no layer keeps keys and values: states have left padding behind."""
    return bool(cache.layers) and not any(isinstance(layer, DynamicLayer) for layer in cache.layers)


def prefill(policy: Policy, prompt_ids: list[list[int]]) -> Prefill:
    device = policy.device
    width = max(len(ids) for ids in prompt_ids)
    tokens = torch.tensor([[policy.pad_id] * (width - len(ids)) + ids for ids in prompt_ids], device=device)  # (P, W)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids], device=device)
    cache = cache_of(policy)
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    output = policy.model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=position,
        use_cache=True,
        logits_to_keep=1,
        **{cache_name(policy): cache},
    )
    return Prefill(mask, cache, position[:, -1:], output.logits[:, -1])


class StopCondition:
    """When each of N requests ends: at a stop token, or at its exact length in `lengths`."""

    def __init__(self, policy: Policy, sampling: Sampling, count: int, lengths: Sequence[int | None] | None) -> None:
        exact = lengths or [None] * count
        self.stop_ids = torch.tensor(sorted(policy.stop_ids), device=policy.device)
        self.exact = torch.tensor([length or 0 for length in exact], device=policy.device)  # (N,) 0: at a stop token
        self.max_length = max(sampling.max_tokens if length is None else length for length in exact)

    def is_done(self, drawn: int, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Whether the requests `rows` (R,) are done after `drawn` tokens, the latest of which are `tokens` (R, T)."""
        exact = self.exact[rows]
        return torch.where(exact > 0, drawn >= exact, torch.isin(tokens, self.stop_ids).any(1))

    def lengths(self, ids: torch.Tensor) -> torch.Tensor:
        """The length (N,) of each completion in `ids` (N, T), which may continue after its end."""
        is_stop = torch.isin(ids, self.stop_ids)
        stopped = torch.where(is_stop.any(1), is_stop.int().argmax(1) + 1, self.max_length)
        return torch.where(self.exact > 0, self.exact, stopped)


def decode(
    policy: Policy,
    prompt_ids: list[list[int]],
    sampling: Sampling,
    keys: list[int],
    lengths: Sequence[int | None] | None = None,
) -> list[Completion]:
    """Token ids, log-probabilities and entropies of each request.

    `keys` are the requests' seeds: the same number for each prompt, those of one prompt adjacent. A request with a
    number in `lengths` gets exactly that many tokens. Each prompt is read once and its cache repeated for its samples.
    Finished rows leave the batch as soon as they are at least half of it.
    """
    device, count = policy.device, len(keys)
    stop = StopCondition(policy, sampling, count, lengths)
    samples = count // len(prompt_ids)
    read = prefill(policy, prompt_ids)
    cache = read.cache
    cache.reorder_cache(torch.arange(len(prompt_ids), device=device).repeat_interleave(samples))
    mask, position, logits = (x.repeat_interleave(samples, 0) for x in (read.mask, read.position, read.logits))
    rows = torch.arange(count, device=device)  # the request of each row of the batch
    ids = torch.full((count, sampling.max_tokens), -1, dtype=torch.long, device=device)
    logprobs, entropies = (torch.zeros(count, sampling.max_tokens, device=device) for _ in range(2))
    alive = torch.ones(count, dtype=torch.bool, device=device)
    seeds = torch.tensor(keys, device=device)
    numbers = None if policy.fused else torch.from_numpy(uniforms(keys, sampling.max_tokens)).to(device)
    cached = {cache_name(policy): cache}
    recurrent = holds_states_alone(cache)
    for t in range(stop.max_length):
        if numbers is None:
            token, logprob, entropy = draw_seeded(logits, sampling.temperature, seeds[rows], t, top_p=sampling.top_p)
        else:
            token, logprob, entropy = draw(logits, sampling.temperature, numbers[rows, t], top_p=sampling.top_p)
        writing = rows[alive]
        ids[writing, t], logprobs[writing, t], entropies[writing, t] = token[alive], logprob[alive], entropy[alive]
        alive = alive & ~stop.is_done(t + 1, token[:, None], rows)
        num_alive = int(alive.sum())
        within((t + 1) / stop.max_length, f"token {t + 1} of {stop.max_length}")
        if num_alive == 0 or t + 1 == stop.max_length:
            break
        if num_alive <= len(rows) // 2:
            keep = alive.nonzero()[:, 0]
            cache.reorder_cache(keep)
            rows, token, mask, position, alive = rows[keep], token[keep], mask[keep], position[keep], alive[keep]
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        position = position + 1
        output = policy.model(
            input_ids=token[:, None],
            attention_mask=None if recurrent else mask,
            position_ids=position,
            use_cache=True,
            **cached,
        )
        logits = output.logits[:, -1]
    return to_completions((ids >= 0).sum(1), ids, logprobs, entropies)


def to_completions(
    lengths: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor, entropies: torch.Tensor
) -> list[Completion]:
    """Each row of `ids`, `logprobs` and `entropies`, all (N, T), cut to its length (N,)."""
    columns = (column.tolist() for column in (lengths, ids, logprobs, entropies))
    return [(row[:n], logps[:n], nats[:n]) for n, row, logps, nats in zip(*columns, strict=True)]
