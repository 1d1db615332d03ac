"""Attention of the policy's text decoder, in training and in sampling through transformers.

PyTorch's SDPA, with two things that it leaves out: sinks (a logit per head that takes part in the softmax and has no
value: gpt-oss) and soft-capped scores (Gemma 2). With a `packing` it also accepts the row of a packed micro-batch, for
which `packed_backend` chooses between

- flash: PyTorch's varlen attention, which reads the row as it is: 16 bits on a GPU, causal attention and windows;
- padded: the right-padded rectangle, on which causal attention needs no mask and any mask is that of transformers;
- masked: the row as one sequence with a block-diagonal mask, whose memory grows with the square of the tokens. The
  reference for flash.

All three know prompts that sequences share; `sharing.py` says where that is worth it. Left out: kernels for sinks and
soft caps without padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qerl_bench.model.keys_values import ATTRIBUTE as KEYS_VALUES
from qerl_bench.model.packing import Packing

# Names of the cache in the forward passes of transformers: from 5.24 on, before, and of state-space models before.
CACHES = ("cache", "past_key_values", "cache_params")
# Attributes of attention that transformers takes for beyond SDPA, and `attention` computes: sinks, soft caps.
BEYOND_SDPA = ("sinks", "attn_logit_softcapping")
NAME = "qerl_bench"  # transformers refuses names with "sdpa" or "flash" in them for models with sinks
_heard: ContextVar[set[str] | None] = ContextVar("heard", default=None)
_SINK_COLUMNS = 8  # by which heads grow for a sink: fast kernels want a multiple of 8


def enable_attention(decoder: PreTrainedModel) -> str | None:
    """Let `decoder` attend with `attention`; returns why it keeps its own attention, or None."""
    if not decoder._can_set_attn_implementation():
        return "its attention cannot be replaced"
    added = any(hasattr(module, name) for module in decoder.modules() for name in BEYOND_SDPA)
    if not (decoder._supports_sdpa or added):
        return "its attention does not support scaled_dot_product_attention"
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    decoder.set_attn_implementation(NAME)
    return None


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packing: Packing | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention (B, T, H, D) of query (B, H, T, D) to key and value (B, KV, S, D); `attention_mask` is true where seen.

    Without a mask it is causal, or all of S is seen by a single query. With `packing`, B is 1 and T the number of real
    tokens; mask and attention are then those of the right-padded rectangle.
    """
    if (rounding := getattr(module, KEYS_VALUES, None)) is not None:
        key, value = rounding.attended(getattr(module, "layer_idx", None), key, value)
    if attention_mask is not None and attention_mask.numel() == 0:
        attention_mask = None  # causal; without `packing`, as some models drop it, sequences mix (`mixes_sequences`)
    sinks, softcap = options.get("s_aux"), options.get("softcap")
    if packing is None and sinks is None and softcap is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    kind = Kind(options.get("scaling") or query.shape[-1] ** -0.5, sinks, softcap, options.get("sliding_window"))
    if packing is None:
        return attend(query, key, value, attention_mask, kind).transpose(1, 2).contiguous(), None
    name = packed_backend(query, value, attention_mask, kind)
    if (heard := _heard.get()) is not None:
        heard.add(name)
    return BACKENDS[name](query, key, value, attention_mask, kind, packing)[None], None


@dataclass(frozen=True)
class Kind:
    """What distinguishes the attention of a layer."""

    scaling: float
    sinks: torch.Tensor | None = None  # (H,)
    softcap: float | None = None
    window: int | None = None  # tokens that a token sees, itself included, where the mask is not causal


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, kind: Kind
) -> torch.Tensor:
    """Attention (B, H, T, D) of query (B, H, T, D) to key and value (B, KV, S, D); causal without a mask."""
    if kind.softcap is not None:
        return softcapped(query, key, value, mask, kind.scaling, kind.softcap)
    if kind.sinks is not None:
        return with_sinks(query, key, value, mask, kind.scaling, kind.sinks)
    return _sdpa(query, key, value, mask, mask is None, kind.scaling)


def packed_backend(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, kind: Kind) -> str:
    """The backend for a packed row on this device; `mask` (1, 1, T, T) is that of the rectangle."""
    size = query.shape[-1]
    fits = query.dtype in (torch.bfloat16, torch.float16) and size == value.shape[-1] and size % 8 == 0 and size <= 256
    plain = kind.sinks is None and kind.softcap is None and (mask is None or kind.window is not None)
    return "flash" if query.is_cuda and fits and plain and has_varlen(mask is not None) else "padded"


@cache
def has_varlen(windows: bool) -> bool:
    """Whether this PyTorch has varlen attention, with windows if needed."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    known = inspect.signature(varlen_attn).parameters
    return "window_size" in known or (not windows and "is_causal" in known)


def padded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kind: Kind,
    packing: Packing,
) -> torch.Tensor:
    """Attention (N, H, D) within the sequences of a row (1, H, N, D), by way of the rectangle."""
    query, key, value = (packing.unpack(x[0].transpose(0, 1)).transpose(1, 2) for x in (query, key, value))
    return packing.pack(attend(query, key, value, mask, kind).transpose(1, 2))


def masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kind: Kind,
    packing: Packing,
) -> torch.Tensor:
    """The same with a mask (N, N), made from what flash gets where that is enough."""
    tokens, shared, positions = query.shape[2], packing.shared, packing.positions
    places = torch.arange(tokens, device=query.device)
    sources, ends = (places, packing.offsets[1:]) if shared is None else (shared.sources, shared.offsets[1:])
    of = torch.bucketize(torch.arange(len(sources), device=query.device), ends, right=True)
    holds = torch.zeros(packing.batch, tokens, dtype=torch.bool, device=query.device)
    holds[of, sources] = True  # which tokens each sequence has
    distance = positions[:, None] - positions
    seen = holds[torch.bucketize(places, packing.offsets[1:], right=True)] & (distance >= 0)
    if mask is not None and kind.window is not None:
        seen &= distance < kind.window
    elif mask is not None:
        seen &= mask[0, 0][positions[:, None], positions]
    return attend(query, key, value, seen[None, None], kind)[0].transpose(0, 1)


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kind: Kind,
    packing: Packing,
) -> torch.Tensor:
    """The same by PyTorch's varlen attention, whose arguments changed from release to release.

    Its queries are the last of as many keys as the sequence has: it aligns causal attention and windows at the end.
    """
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    before = -1 if mask is None or kind.window is None else kind.window - 1
    options: dict[str, Any] = {"window_size": (before, 0)} if "window_size" in known else {"is_causal": True}
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, H, D)
    shared, ends, longest = packing.shared, packing.offsets, packing.longest
    if shared is not None:
        key, value = shared.repeat(key), shared.repeat(value)
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    key_ends = ends if shared is None else shared.offsets
    if "enable_gqa" in known:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    else:
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    if "scale" in known:
        options["scale"] = kind.scaling
    else:  # it multiplies by D^-0.5
        query = query * (kind.scaling * query.shape[-1] ** 0.5)
    attended = varlen_attn(query, key, value, ends, key_ends, longest, longest, **options)
    assert isinstance(attended, torch.Tensor)  # not a pair, for which nothing asks
    return attended


BACKENDS = {"flash": flash, "padded": padded, "masked": masked}


@contextmanager
def backends_of() -> Iterator[set[str]]:
    """Inside, the names of the backends that packed sequences get."""
    used: set[str] = set()
    token = _heard.set(used)
    try:
        yield used
    finally:
        _heard.reset(token)


def with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Attention in which `sinks` (H,) are one more logit of each softmax.

    As one more key that everything sees, with value 0: heads grow by a coordinate that is 1 in this key and 0 in all
    others, and sink / scaling in the queries. So every kernel of SDPA serves, and shared key heads stay shared.
    """
    size, queries = value.shape[-1], query.shape[2]
    column = (sinks.to(query.dtype) / scaling).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    query = torch.cat([query, pad(column, (0, _SINK_COLUMNS - 1))], dim=-1)
    key, value = (pad(x, (0, _SINK_COLUMNS, 1, 0)) for x in (key, value))  # the new key comes first
    key[:, :, 0, query.shape[-1] - _SINK_COLUMNS] = 1
    if mask is not None:
        mask = pad(mask, (1, 0), value=True)
    elif queries > 1:
        query = pad(query, (0, 0, 1, 0))  # a query for the new key, so that causality is that of a square
    attended = _sdpa(query, key, value, mask, mask is None and queries > 1, scaling)
    return attended[:, :, -queries:, :size]


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scaling: float,
) -> torch.Tensor:
    shared = query.shape[1] // key.shape[1]
    if mask is not None:  # fast kernels share key heads only without one
        key, value, shared = repeat_kv(key, shared), repeat_kv(value, shared), 1
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=shared > 1
    )


def softcapped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    """Attention whose scores s are softcap * tanh(s / softcap), in plain PyTorch with a softmax in FP32."""
    key, value = (repeat_kv(x, query.shape[1] // key.shape[1]) for x in (key, value))
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * scaling / softcap)
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value
