"""Log-probability and entropy of given tokens without ever holding the logits of all of them.

A 152k vocabulary makes the logits of one 16 x 1024 micro-batch 10 GB in FP32. Here they exist for a few tokens at a
time, in the forward pass and again in the backward pass, which makes them anew. Any module can be the head: packed,
with bias, tied to the embedding, or with an adapter of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from qerl_kernels.loss_head import Scores, linear_scores, plain_scores

LOGITS_AT_ONCE = 2**27  # elements: 512 MiB in FP32, of which a backward pass holds a few copies

Head = Callable[[torch.Tensor], torch.Tensor]


def token_scores(
    head: Head,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    vocabulary: int,
    entropy_gradient: bool = False,
    at_once: int = LOGITS_AT_ONCE,
    fused: bool = False,
) -> Scores:
    """Of M tokens, each (M,) FP32: log-probability and entropy at `temperature`, entropy at temperature 1, all in
    nats, and 1 where greedy decoding would have chosen the token.

    `hidden` (M, H) goes through `head` to logits (M, V) in pieces of at most `at_once` elements; `targets` (M,) are the
    tokens asked for. Only the log-probability carries a gradient, with `entropy_gradient` the first entropy too.
    `fused` takes the kernels of `qerl_kernels.loss_head` where the head is a frozen matrix.
    """
    rows = max(1, at_once // vocabulary)

    def scores(hidden: torch.Tensor, targets: torch.Tensor) -> Scores:
        return plain_scores(head(hidden), targets, temperature, entropy_gradient)

    if fused and isinstance(head, torch.nn.Linear) and _frozen_matrix(head, hidden.dtype):
        found = linear_scores(hidden, head.weight, head.bias, targets, temperature, entropy_gradient, at_once)
    elif len(hidden) <= rows:
        found = scores(hidden, targets)
    else:
        pieces = zip(hidden.split(rows), targets.split(rows), strict=True)
        if torch.is_grad_enabled():
            parts = [checkpoint(scores, piece, wanted, use_reentrant=False) for piece, wanted in pieces]
        else:
            parts = [scores(piece, wanted) for piece, wanted in pieces]
        found = tuple(torch.cat(part) for part in zip(*parts, strict=True))
    logprobs, entropy, entropy_t1, likeliest = found
    assert not bool((logprobs > 0).any()), "a log-probability above 0: the softmax is broken"
    return logprobs, entropy, entropy_t1, likeliest


def _frozen_matrix(head: torch.nn.Linear, dtype: torch.dtype) -> bool:
    """Whether `head` is nothing but a matrix in `dtype` that gets no gradient."""
    plain = type(head) is torch.nn.Linear and head.weight.dtype == dtype
    return plain and not any(parameter.requires_grad for parameter in head.parameters())
