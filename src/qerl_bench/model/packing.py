"""Training without padding: the sequences of a micro-batch are concatenated to one row.

Only attention needs to know where a sequence ends (`attention.py`). Its windows and chunks have the mask that
transformers makes for the right-padded rectangle. All other layers, which do nearly all of the arithmetic, never see
padding. Prompts may be shared (`shared_prompts.py`). Left out: packing across micro-batches, and layers that carry a
state from token to token (linear attention, convolutions), which would carry it across sequences: `mixes_sequences`
finds them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_chunked_causal_mask, create_sliding_window_causal_mask

from qerl_bench.model.shared_prompts import SharedPrompts, first_with_prompt, prompt_lengths
from qerl_core.process.out_of_memory import shortage

LOCAL_MASKS = {
    "sliding_attention": create_sliding_window_causal_mask,
    "chunked_attention": create_chunked_causal_mask,
}


@dataclass(frozen=True)
class Packing:
    """Where the N computed tokens of right-padded (B, T) sequences are, and the M completion tokens among them.

    All real tokens are computed, those of a prompt that several sequences share in the first of these. Made on the
    host, so that nothing on the way from batch to optimizer waits for the GPU.
    """

    batch: int
    width: int
    longest: int  # tokens of the longest sequence
    indices: torch.Tensor  # (N,) index b * T + t of each token, in order
    offsets: torch.Tensor  # (B + 1,) int32: the place among them of each sequence's first token, and N
    scored: torch.Tensor  # (M,) index b * T + t of each completion token, in order
    places: torch.Tensor  # (M,) its place among the N tokens
    predictors: torch.Tensor  # (M,) the place of the token before it in its sequence, which predicts it
    shared: SharedPrompts | None  # None if each sequence has its own prompt

    @classmethod
    def from_mask(cls, mask: torch.Tensor, input_ids: torch.Tensor | None = None) -> Packing:
        """From the completion mask (B, T). A sequence ends with its last completion token, or else its first token.

        With `input_ids` (B, T), sequences whose tokens before the first completion token are equal share these.
        """
        host = mask.cpu()
        batch, width = host.shape
        columns = torch.arange(width)
        lengths = ((columns + 1) * host).amax(1).clamp(min=1)  # (B,)
        first = torch.arange(batch) if input_ids is None else first_with_prompt(input_ids.cpu(), host)
        starts = prompt_lengths(host).where(first != torch.arange(batch), 0)  # (B,) the first column that is computed
        real = columns < lengths[:, None]  # (B, T)
        computed = real & (columns >= starts[:, None])
        place = computed.flatten().cumsum(0).view(batch, width) - 1
        place = place.where(columns >= starts[:, None], place[first])
        scored = host.flatten().nonzero()[:, 0]
        packing = cls(
            batch=batch,
            width=width,
            longest=int(lengths.max()),
            indices=computed.flatten().nonzero()[:, 0],
            offsets=_offsets(lengths - starts),
            scored=scored,
            places=place.flatten()[scored],
            predictors=place.flatten()[scored - 1],
            shared=None
            if bool(computed.equal(real))
            else SharedPrompts.of(
                cells=real.flatten().nonzero()[:, 0],
                sources=place[real],
                offsets=_offsets(lengths),
                own=computed[real].nonzero()[:, 0],
            ),
        )
        return packing.to(mask.device)

    def to(self, device: torch.device) -> Packing:
        tensors = ("indices", "offsets", "scored", "places", "predictors")
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in tensors}
        return replace(self, **moved, shared=None if self.shared is None else self.shared.to(device))

    @property
    def positions(self) -> torch.Tensor:
        """Position of each token within its own sequence (N,)."""
        return self.indices % self.width

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """(B, T, ...) -> (N, ...)."""
        return padded.flatten(0, 1).index_select(0, self.indices)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """(N, ...) -> (B, T, ...), 0 at padding; each sequence with its prompt."""
        if self.shared is not None:
            return self._rectangle(self.shared.repeat(packed), self.shared.cells)
        return self._rectangle(packed, self.indices)

    def completion(self, padded: torch.Tensor) -> torch.Tensor:
        """(B, T, ...) -> (M, ...)."""
        return padded.flatten(0, 1).index_select(0, self.scored)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(M, ...) -> (B, T, ...), 0 off the completions."""
        return self._rectangle(values, self.scored)

    def _rectangle(self, values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        shape = (self.batch * self.width, *values.shape[1:])
        return values.new_zeros(shape).index_copy(0, indices, values).unflatten(0, (self.batch, self.width))


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    """Where each of B pieces of `lengths` (B,) begins, and where the last one ends: (B + 1,) int32."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def packed_hidden(decoder: PreTrainedModel, input_ids: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Last hidden states (N, H) of right-padded `input_ids` (B, T), computed for the tokens of `packing` only.

    `decoder` must attend with `attention.attention`.
    """
    output = decoder(
        input_ids=packing.pack(input_ids)[None],
        position_ids=packing.positions[None],
        attention_mask=_rectangle_masks(decoder, input_ids),
        use_cache=False,
        packing=packing,
    )
    return output.last_hidden_state[0]


def _rectangle_masks(decoder: PreTrainedModel, input_ids: torch.Tensor) -> Any:
    """The masks of right-padded `input_ids` (B, T), (1, 1, T, T): one, or a dict with one for each type of layer.

    An empty 4-D tensor stands for causal attention: given a 4-D mask, transformers builds none of its own.
    """
    config: Any = decoder.config
    shape = torch.empty(1, input_ids.shape[1], 0, dtype=decoder.dtype, device=input_ids.device)

    def mask_of(kind: str) -> torch.Tensor | None:  # None is causal
        if kind not in LOCAL_MASKS:
            return None
        return LOCAL_MASKS[kind](config, shape, None, None)

    kinds = getattr(config, "layer_types", None)
    masks: Any = {kind: mask_of(kind) for kind in set(kinds or ())}
    if kinds is None and getattr(config, "sliding_window", None) is not None:
        masks = {None: mask_of("sliding_attention")}
    if all(mask is None for mask in masks.values()):
        return torch.empty(1, 1, 0, 0, device=input_ids.device)
    return masks if kinds is not None else masks[None]


def why_not_packed(decoder: PreTrainedModel) -> str | None:
    """Why sequences of this decoder cannot be concatenated to one row; None if they can."""
    try:
        mixed = mixes_sequences(decoder)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # some make masks of their own
        if shortage(error):
            raise
        return f"it cannot compute a packed row ({error})"
    return "some of its layers read on from one packed sequence to the next" if mixed else None


@torch.no_grad()
def mixes_sequences(decoder: PreTrainedModel) -> bool:
    """Whether a packed sequence reads its neighbour: two sequences of which the first is NaN everywhere."""
    embedding: Any = decoder.get_input_embeddings()
    device = embedding.weight.device
    packing = Packing.from_mask(torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 1, 0]], device=device))
    poison = torch.full((1, 9, 1), torch.nan, device=device)
    poison[:, 5:] = 1

    def poisoned(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output * poison.to(output.dtype)

    handle = embedding.register_forward_hook(poisoned)
    try:
        hidden = packed_hidden(decoder, torch.arange(10, device=device).view(2, 5), packing)
    finally:
        handle.remove()
    assert bool(hidden[:5].isnan().all()), "the first sequence is not NaN, so nothing was tested"
    return not bool(hidden[5:].isfinite().all())
