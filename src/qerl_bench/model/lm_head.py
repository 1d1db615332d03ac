"""Log-probability and entropy of given tokens, without the logits of all tokens at once.

With a vocabulary of 152k, the logits of one 16 x 1024 micro-batch take 10 GB in FP32. Here they are computed for a few
tokens at a time, in the forward pass and again in the backward pass. Any module can be the head: packed, with a bias,
tied to the embedding, or with an adapter of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from qerl_bench.model.packing import Packing, packed_hidden
from qerl_kernels.loss_head import Scores, linear_scores, plain_scores

MAX_LOGITS_PER_CHUNK = 2**27  # elements: 512 MiB in FP32; a backward pass holds a few copies

Head = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class TokenStats:
    """Per-token numbers of the policy, each (B, T) in FP32 and 0 where the mask is false."""

    logprobs: torch.Tensor  # with gradient
    entropy: torch.Tensor  # nats, full vocabulary, at the rollout temperature; with gradient only on request
    entropy_t1: torch.Tensor  # the same at temperature 1
    likeliest: torch.Tensor  # 1 where greedy decoding would have chosen the token


def token_stats(
    model: Any,
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    temperature: float,
    entropy_gradient: bool = False,
    packing: bool = False,
    fused: bool = False,
) -> TokenStats:
    """Log-probability and entropy of each masked token of right-padded `input_ids` (B, T), given the tokens before it.

    Padding comes after every real token, so causal attention ignores it; with `packing` it is not computed at all. The
    loss head runs only where `mask` (B, T) is true.
    """
    predicts = mask.roll(-1, dims=1)  # (B, T) position t predicts token t + 1; column 0 of `mask` is never true
    if packing:
        packed = Packing.from_mask(mask)
        hidden = packed_hidden(model, input_ids, packed)[packed.pack(predicts)]  # (M, H)
    else:
        hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state[predicts]  # (M, H)
    vocabulary = model.config.vocab_size
    scores = token_scores(
        model.lm_head, hidden, input_ids[mask], temperature, vocabulary, entropy_gradient, fused=fused
    )
    zeros = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return TokenStats(*(zeros.masked_scatter(mask, score) for score in scores))


def token_scores(
    head: Head,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    vocabulary: int,
    entropy_gradient: bool = False,
    max_logits: int = MAX_LOGITS_PER_CHUNK,
    fused: bool = False,
) -> Scores:
    """The four numbers of TokenStats for M tokens, each (M,) FP32.

    `head` turns `hidden` (M, H) into logits (M, V), at most `max_logits` elements at a time. `targets` (M,) are the
    tokens to score. Only the log-probability has a gradient, and with `entropy_gradient` the first entropy too. `fused`
    uses the kernels of `qerl_kernels.loss_head` if the head is a frozen matrix.
    """
    rows = max(1, max_logits // vocabulary)

    def chunk_scores(hidden: torch.Tensor, targets: torch.Tensor) -> Scores:
        return plain_scores(head(hidden), targets, temperature, entropy_gradient)

    if fused and isinstance(head, torch.nn.Linear) and _is_frozen_matrix(head, hidden.dtype):
        scores = linear_scores(hidden, head.weight, head.bias, targets, temperature, entropy_gradient, max_logits)
    elif len(hidden) <= rows:
        scores = chunk_scores(hidden, targets)
    else:
        chunks = list(zip(hidden.split(rows), targets.split(rows), strict=True))
        if torch.is_grad_enabled():
            parts = [checkpoint(chunk_scores, *chunk, use_reentrant=False) for chunk in chunks]
        else:
            parts = [chunk_scores(*chunk) for chunk in chunks]
        scores = tuple(torch.cat(part) for part in zip(*parts, strict=True))
    logprobs, entropy, entropy_t1, likeliest = scores
    assert not bool((logprobs > 0).any()), "a log-probability above 0: the softmax is broken"
    return logprobs, entropy, entropy_t1, likeliest


def _is_frozen_matrix(head: torch.nn.Linear, dtype: torch.dtype) -> bool:
    """Whether `head` is a plain linear layer in `dtype` without gradient."""
    plain = type(head) is torch.nn.Linear and head.weight.dtype == dtype
    return plain and not any(parameter.requires_grad for parameter in head.parameters())
