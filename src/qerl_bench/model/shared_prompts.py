"""Prompts that several sequences of a micro-batch share, as those of a group do: their tokens pass the layers once.

They are computed in the first sequence that has them. Attention gets the keys and values of whole sequences, which
`SharedPrompts.repeat` puts together. Left out: prompts of which only the beginning is equal.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch


def prompt_lengths(mask: torch.Tensor) -> torch.Tensor:
    """The tokens (B,) before the first that is true in the completion mask (B, T); 0 without completion."""
    return mask.int().argmax(1)


def first_with_prompt(input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """For each row of `input_ids` (B, T) the first with the same prompt (B,), itself if there is no other.

    `mask` (B, T) is true on completions; a row without one shares nothing. Both are on the host.
    """
    ids, first = input_ids.numpy(), dict[bytes, int]()
    lengths, completed = prompt_lengths(mask).tolist(), mask.any(1).tolist()
    keys = [ids[row, :length].tobytes() if completed[row] else b"" for row, length in enumerate(lengths)]
    rows = [first.setdefault(key, row) if key else row for row, key in enumerate(keys)]
    return torch.tensor(rows, dtype=torch.long)


@dataclass(frozen=True)
class SharedPrompts:
    """Where B sequences of S tokens find them among the N tokens that are computed, of which R read some."""

    cells: torch.Tensor  # (S,) index b * T + t of each token of the right-padded sequences, in order
    sources: torch.Tensor  # (S,) its place among the computed tokens
    offsets: torch.Tensor  # (B + 1,) int32: the index in `sources` of each sequence's first token, and S
    own: torch.Tensor  # (N,) the index in `sources` of each computed token, in its own sequence
    repeated: torch.Tensor  # (P,) the places of the computed tokens that several sequences have
    readers: torch.Tensor  # (P, R) their indices in `sources`, and S where a token has fewer than R

    @classmethod
    def of(cls, cells: torch.Tensor, sources: torch.Tensor, offsets: torch.Tensor, own: torch.Tensor) -> SharedPrompts:
        """With `repeated` and `readers` of `sources`; on the host."""
        counts = torch.bincount(sources)  # (N,)
        order = sources.argsort(stable=True)  # (S,) side by side what reads the same token
        turn = torch.arange(len(order)) - (counts.cumsum(0) - counts)[sources[order]]  # 0 for its first reader
        several = counts > 1
        row = several.cumsum(0) - 1
        readers = torch.full((int(several.sum()), int(counts.max())), len(sources))
        chosen = several[sources[order]]
        readers[row[sources[order[chosen]]], turn[chosen]] = order[chosen]
        return cls(cells, sources, offsets, own, several.nonzero()[:, 0], readers)

    def to(self, device: torch.device) -> SharedPrompts:
        return SharedPrompts(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def repeat(self, computed: torch.Tensor) -> torch.Tensor:
        """(N, ...) -> (S, ...), each sequence whole. Gradients of the copies are added in FP32, in a fixed order."""
        repeated = _Repeat.apply(computed, self)
        assert isinstance(repeated, torch.Tensor)
        return repeated


class _Repeat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, computed: torch.Tensor, prompts: SharedPrompts) -> torch.Tensor:
        ctx.prompts = prompts
        return computed.index_select(0, prompts.sources)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        prompts, (gradient,) = ctx.prompts, gradients
        total = gradient.index_select(0, prompts.own)
        zero = gradient.new_zeros(1, *gradient.shape[1:])
        copies = torch.cat([gradient, zero]).index_select(0, prompts.readers.flatten())
        wide = torch.promote_types(gradient.dtype, torch.float32)
        sums = copies.unflatten(0, prompts.readers.shape).sum(1, dtype=wide)  # (P, ...)
        return total.index_copy_(0, prompts.repeated, sums.to(total.dtype)), None
