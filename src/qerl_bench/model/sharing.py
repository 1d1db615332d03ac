"""Whether training computes a prompt once for all completions to it (`shared_prompts.py`), decided for a whole model.

It does where attention reads packed sequences as they are. The padded rectangle has each prompt once for each sequence,
and is smallest if these are about as long, which those of a group are not. Left out: a CPU, whose runs keep their bits,
mixtures, of whose experts records are kept, and passes under autocast.
"""

from __future__ import annotations

from functools import cache

import torch
from transformers import PreTrainedModel

from qerl_bench.model.attention import Kind, backends_of, flash, has_varlen, masked
from qerl_bench.model.packing import Packing, packed_hidden

MAX_GAP = 0.1  # in bfloat16, between values of about 1; where queries see other keys, some differ by more than 1


@torch.no_grad()
def why_not_shared(decoder: PreTrainedModel, packing: bool, experts: bool) -> str | None:
    """Why sequences are not to share their prompts, or None if they are. Computes two short ones, to see how.

    `packing`: whether they are packed. `experts`: whether `decoder` is a mixture.
    """
    if not packing:
        return "sequences are padded"
    if experts:
        return "the model has experts"
    device = next(decoder.parameters()).device
    if device.type != "cuda":
        return f"the device is {device.type}"
    with backends_of() as used:
        layout, ids = _example(device)
        packed_hidden(decoder, ids, layout)
    if used != {"flash"}:
        return f"attention to packed sequences is {' and '.join(sorted(used))}"
    return None if _aligned_at_the_end(device) else "varlen attention here aligns queries and keys at the beginning"


def _example(device: torch.device) -> tuple[Packing, torch.Tensor]:
    """Two completions, of three tokens and of two, to a prompt of four, and their token ids (2, 7)."""
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 8, 9, 0]], device=device)
    mask = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1, 0]], device=device)
    return Packing.from_mask(mask, ids), ids


@cache
def _aligned_at_the_end(device: torch.device) -> bool:
    """Whether a completion's queries see, through flash, what the reference lets them see."""
    packing, ids = _example(device)
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 1, len(packing.indices), 64, generator=generator) for _ in range(3)]
    query, key, value = (x.to(device, torch.bfloat16) for x in drawn)

    def gap(window: int | None) -> float:
        kind, mask = Kind(64**-0.5, window=window), None if window is None else torch.ones_like(ids)
        found, wanted = (backend(query, key, value, mask, kind, packing) for backend in (flash, masked))
        return float((found - wanted).abs().max())

    return max(gap(window) for window in (None, *((3,) if has_varlen(windows=True) else ()))) < MAX_GAP
