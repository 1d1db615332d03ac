"""Keys and values in few bits: `rollout.kv`, `train.kv` and `eval.kv`.

Each token and head is rounded by itself, keys after their rotation, where they are written to the cache; passes without
a cache, those of training, round the same tensors by the same function before they attend, and gradients pass straight
through. What is kept is in the dtype of the model: numbers of few bits, no fewer bytes. Left out: recorded decoding and
recorded passes of training, and the states of layers that have no keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from qerl_bench.quant.base import NOT_ROUNDED
from qerl_bench.quant.kv_kinds import Kinds
from qerl_kernels.activations import fallen_back, round_rows

REASON = "keys and values are rounded"  # why a recorded path is not taken
BOTH = ("keys", "values")
ATTRIBUTE = "keys_values"  # of each module of a model whose keys and values are rounded


class Seen(NamedTuple):
    """Keys and values (B, KV, T, D) of one layer in a pass that is looked at."""

    layer: int | None
    key: torch.Tensor
    value: torch.Tensor


class KVRounding:
    """Rounds keys and values (B, KV, T, D), and counts what becomes zero and scales that fall back.

    `kind` is that of passes of training, `sampled` that of what samples; `answering` makes both that of evaluations.
    """

    def __init__(self, kinds: Kinds, device: torch.device) -> None:
        self.kinds, self.kind, self.sampled = kinds, kinds.train, kinds.rollout
        self.on, self.fused, self.at_pages = True, True, False
        self.parts: frozenset[str] = frozenset(BOTH)  # which of the two are rounded
        self.counts = torch.zeros(2, dtype=torch.long, device=device)  # of numbers: lost, of how many
        self.scales = torch.zeros(2, dtype=torch.long, device=device)  # of tokens and heads: fallen back, of how many
        self.watched: tuple[list[Seen], list[Seen]] | None = None

    def written(self, layer: int | None, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What a cache keeps of the tokens that a layer writes."""
        if self.watched is not None:
            self.watched[0].append(Seen(layer, key, value))
        return self(key, value)

    def attended(self, layer: int | None, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer attends to: as it is where it was rounded when it was written."""
        if self.watched is not None:
            self.watched[1].append(Seen(layer, key, value))
        return (key, value) if self.at_pages else self(key, value)

    def __call__(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.on or self.kind == NOT_ROUNDED or self.watched is not None:
            return key, value
        kept: Any = {"keys": key, "values": value}
        kept |= {part: _StraightThrough.apply(kept[part], self) for part in BOTH if part in self.parts}
        return kept["keys"], kept["values"]

    @contextmanager
    def sampling(self, at_pages: bool) -> Iterator[None]:
        """Context in which passes are those of what samples; with `at_pages` only a `RoundedCache` rounds."""
        before = self.kind, self.at_pages
        self.kind, self.at_pages = self.sampled, at_pages
        try:
            yield
        finally:
            self.kind, self.at_pages = before

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Context of an evaluation."""
        before = self.kind, self.sampled
        self.kind = self.sampled = self.kinds.eval
        try:
            yield
        finally:
            self.kind, self.sampled = before

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context in which keys and values stay as they are."""
        on, self.on = self.on, False
        try:
            yield
        finally:
            self.on = on

    @contextmanager
    def watching(self) -> Iterator[tuple[list[Seen], list[Seen]]]:
        """Context in which nothing is rounded; what layers write to a cache, and what they attend to."""
        self.watched = [], []
        try:
            yield self.watched
        finally:
            self.watched = None

    def take(self) -> dict[str, tuple[int, int]]:
        """Counts since the last call, by metric: how many, of how many. Waits for the device."""
        if not self.kinds.rounds:
            return {}
        (lost, numbers), (fallen, scales) = self.counts.tolist(), self.scales.tolist()
        self.counts.zero_()
        self.scales.zero_()
        return {"kv/underflow": (lost, numbers), "kv/scale_fallback": (fallen, scales)}

    def cache(self, config: Any) -> DynamicCache:
        """An empty cache for the layers of `config`."""
        return RoundedCache(config, self) if self.kinds.rounds else DynamicCache(config=config)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rounding: KVRounding) -> torch.Tensor:
        rounding.scales[0] += fallen_back(x, rounding.kind)
        rounding.scales[1] += x[..., 0].numel()
        return round_rows(x, rounding.kind, rounding.counts, rounding.fused)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return grads[0], None


class RoundedCache(DynamicCache):
    """A cache whose keys and values are rounded where they are written."""

    def __init__(self, config: Any, rounding: KVRounding) -> None:
        super().__init__(config=config)
        self.rounding = rounding

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        kept = self.rounding.written(layer_idx, key_states, value_states)
        return super().update(*kept, layer_idx, *args, **kwargs)


def round_keys_values(model: torch.nn.Module, kinds: Kinds, device: torch.device) -> KVRounding:
    """Let the attention of `model` round what it attends to; what rounds it."""
    rounding = KVRounding(kinds, device)
    if kinds.rounds:
        for module in model.modules():
            setattr(module, ATTRIBUTE, rounding)
    return rounding
