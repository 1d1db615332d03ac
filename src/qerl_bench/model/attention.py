"""Attention of the policy's text decoder, in training and in sampling through transformers.

PyTorch's SDPA, with two things that it leaves out: sinks (a logit per head that takes part in the softmax and has no
value: gpt-oss) and soft-capped scores (Gemma 2). With a `packing` it also accepts the row of a packed micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qerl_bench.model.packing import Packing

NAME = "qerl_bench"  # transformers refuses names with "sdpa" or "flash" in them for models with sinks
_SINK_COLUMNS = 8  # by which heads grow for a sink: fast kernels want a multiple of 8


def enable_attention(decoder: PreTrainedModel) -> str | None:
    """Let `decoder` attend with `attention`; returns why it keeps its own attention, or None."""
    if not decoder._can_set_attn_implementation():
        return "its attention cannot be replaced"
    if not decoder._supports_sdpa and not any(hasattr(module, "sinks") for module in decoder.modules()):
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
    if attention_mask is not None and attention_mask.numel() == 0:
        attention_mask = None  # causal; without `packing`, as some models drop it, sequences mix (`mixes_sequences`)
    sinks, softcap = options.get("s_aux"), options.get("softcap")
    if packing is None and sinks is None and softcap is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if packing is not None:
        query, key, value = (packing.unpack(x[0].transpose(0, 1)).transpose(1, 2) for x in (query, key, value))
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    if softcap is not None:
        attended = softcapped(query, key, value, attention_mask, scaling, softcap)
    elif sinks is not None:
        attended = with_sinks(query, key, value, attention_mask, scaling, sinks)
    else:
        attended = _sdpa(query, key, value, attention_mask, attention_mask is None, scaling)
    attended = attended.transpose(1, 2)
    return attended.contiguous() if packing is None else packing.pack(attended)[None], None


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
