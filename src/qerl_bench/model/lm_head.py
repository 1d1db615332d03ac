"""Log-probability and entropy of given tokens, without the logits of all tokens at once.

With a vocabulary of 152k, the logits of one 16 x 1024 micro-batch take 10 GB in FP32. Here they are computed for a few
tokens at a time, in the forward pass and again in the backward pass. The head is whatever the model does between last
hidden states and logits: a matrix (packed, tied to the embedding, with a bias or an adapter of its own), and in some
architectures a scaling or a soft cap behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

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


class _Output(BaseModelOutputWithPast):
    """Has every other field that a decoder may return, as None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def head_of(model: PreTrainedModel) -> Head:
    """The model's own way from last hidden states (M, H) to logits (M, V).

    It is the model's own forward pass around a decoder that returns the embeddings it gets as last hidden states. Where
    that computes no more than the output matrix, the head is this module, so that `token_scores` can use its kernels.
    Call this with all adapters in place.
    """

    def embeddings_unchanged(*_: Any, inputs_embeds: torch.Tensor, **__: Any) -> BaseModelOutputWithPast:
        return _Output(last_hidden_state=inputs_embeds)  # type: ignore[arg-type]  # says FloatTensor

    name = model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"
    body = _copy_with(model.get_submodule(name), forward=embeddings_unchanged)
    shell = _copy_with(model, _modules={**model._modules, name: body})

    def own_head(hidden: torch.Tensor) -> torch.Tensor:
        return shell(inputs_embeds=hidden[None], use_cache=False).logits[0]

    matrix: Any = model.get_output_embeddings()
    width = model.config.get_text_config().hidden_size
    sample = torch.randn(2, width, generator=torch.Generator().manual_seed(0)).to(model.device, model.dtype)
    with torch.no_grad():
        is_plain = torch.equal(own_head(sample), matrix(sample))
    return matrix if is_plain else own_head


def _copy_with(module: torch.nn.Module, **attributes: Any) -> Any:
    """A second module with the same parts as `module`, except for `attributes`."""
    copy = module.__new__(type(module))
    copy.__dict__ = module.__dict__ | attributes
    return copy


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The part that makes last hidden states from text tokens."""
    decoder = model.get_decoder()
    return model.model if decoder is model else decoder


def hidden_states(
    model: PreTrainedModel, input_ids: torch.Tensor, mask: torch.Tensor, chosen: torch.Tensor, packing: bool
) -> torch.Tensor:
    """Last hidden states (M, H) of right-padded `input_ids` (B, T) where `chosen` (B, T) is true.

    `mask` (B, T) is true for completion tokens. Padding comes after every real token, so causal layers ignore it; with
    `packing` it is not computed at all.
    """
    decoder = decoder_of(model)
    if packing:
        packed = Packing.from_mask(mask)
        return packed_hidden(decoder, input_ids, packed)[packed.pack(chosen)]
    return decoder(input_ids=input_ids, use_cache=False).last_hidden_state[chosen]


def token_stats(
    model: PreTrainedModel,
    head: Head,
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    temperature: float,
    entropy_gradient: bool = False,
    packing: bool = False,
    fused: bool = False,
    layout: Packing | None = None,
) -> TokenStats:
    """Log-probability and entropy of each masked token of right-padded `input_ids` (B, T), given the tokens before it.

    `head` is `head_of(model)`; it runs only where `mask` (B, T) is true. With `layout`, that of `mask` on the device of
    `input_ids`, nothing here waits for a GPU.
    """
    layout = Packing.from_mask(mask) if layout is None else layout
    decoder = decoder_of(model)
    if packing:  # column 0 of `mask` is never true, so that every completion token has one before it
        hidden = packed_hidden(decoder, input_ids, layout).index_select(0, layout.predictors)
    else:
        padded = decoder(input_ids=input_ids, use_cache=False).last_hidden_state
        hidden = padded.flatten(0, 1).index_select(0, layout.scored - 1)
    vocabulary = model.config.get_text_config().vocab_size
    targets = layout.completion(input_ids)
    scores = token_scores(head, hidden, targets, temperature, vocabulary, entropy_gradient, fused=fused)
    return TokenStats(*map(layout.spread, scores))


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
    if not logprobs.is_cuda:  # there, it would wait for the GPU; `update` checks the log-probabilities of a step
        require_logprobs(logprobs)
    return logprobs, entropy, entropy_t1, likeliest


def require_logprobs(logprobs: torch.Tensor) -> None:
    """An invariant: a probability above 1 would mean that the softmax is broken."""
    assert not bool((logprobs > 0).any()), "a log-probability above 0: the softmax is broken"


def _is_frozen_matrix(head: torch.nn.Linear, dtype: torch.dtype) -> bool:
    """Whether `head` is a plain linear layer in `dtype` without gradient."""
    plain = type(head) is torch.nn.Linear and head.weight.dtype == dtype
    return plain and not any(parameter.requires_grad for parameter in head.parameters())
