"""Training without padding: the sequences of a micro-batch end to end in one row.

Attention alone needs to know where one sequence ends. It gets its own rectangle back, padded on the right and causal,
which needs no mask and so can use the fast kernels; all other layers, where nearly all of the arithmetic is, never
see padding. Left out: packing across micro-batches, and attention without any padding, for which PyTorch has no
portable kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_packed"


@dataclass(frozen=True)
class Packing:
    """Where the N real tokens of right-padded (B, T) sequences stand."""

    batch: int
    width: int
    places: torch.Tensor  # (N,) index b * T + t of each real token, in order

    @classmethod
    def of(cls, mask: torch.Tensor) -> Packing:
        """From the completion mask (B, T): a sequence ends with its last completion token, or else its first token."""
        batch, width = mask.shape
        columns = torch.arange(width, device=mask.device)
        lengths = ((columns + 1) * mask).amax(1).clamp(min=1)  # (B,)
        return cls(batch, width, (columns < lengths[:, None]).flatten().nonzero()[:, 0])

    @property
    def positions(self) -> torch.Tensor:
        """Position of each token within its own sequence (N,)."""
        return self.places % self.width

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """(B, T, ...) -> (N, ...)."""
        return padded.flatten(0, 1).index_select(0, self.places)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """(N, ...) -> (B, T, ...), 0 at padding."""
        shape = (self.batch * self.width, *packed.shape[1:])
        return packed.new_zeros(shape).index_copy(0, self.places, packed).unflatten(0, (self.batch, self.width))


def enable(model: PreTrainedModel) -> None:
    """Let `model` attend as before, and sequence by sequence wherever its forward pass is given a `packing`."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def packed_hidden(model: PreTrainedModel, input_ids: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Last hidden states (N, H) of right-padded `input_ids` (B, T), computed on the real tokens alone."""
    ready = torch.empty(1, 1, 0, 0, device=input_ids.device)  # of four dimensions, so that no mask is built; never read
    output = model.model(
        input_ids=packing.pack(input_ids)[None],
        position_ids=packing.positions[None],
        attention_mask=ready,
        use_cache=False,
        packing=packing,
    )
    return output.last_hidden_state[0]


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packing: Packing | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' SDPA; with `packing`, query (1, heads, N, D), key and value (1, kv heads, N, D)."""
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    window = options.get("sliding_window")
    assert window is None or window >= packing.width, "packed attention sees whole sequences; set train.packing=false"
    rectangles = (packing.unpack(x[0].transpose(0, 1)).transpose(1, 2) for x in (query, key, value))  # (B, heads, T, D)
    attended = torch.nn.functional.scaled_dot_product_attention(
        *rectangles,
        dropout_p=options.get("dropout", 0.0),
        is_causal=True,
        scale=options.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return packing.pack(attended.transpose(1, 2))[None], None
