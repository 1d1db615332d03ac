"""Training without padding: the sequences of a micro-batch are concatenated to one row.

Only attention needs to know where a sequence ends. It gets the right-padded rectangle back: causal attention on it
needs no mask, so it can use the fast kernels. All other layers, which do nearly all of the arithmetic, never see
padding. Left out: packing across micro-batches, and attention without padding, for which PyTorch has no portable
kernel.
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
    """The positions of the N real tokens of right-padded (B, T) sequences."""

    batch: int
    width: int
    indices: torch.Tensor  # (N,) index b * T + t of each real token, in order

    @classmethod
    def from_mask(cls, mask: torch.Tensor) -> Packing:
        """From the completion mask (B, T). A sequence ends with its last completion token, or else its first token."""
        batch, width = mask.shape
        columns = torch.arange(width, device=mask.device)
        lengths = ((columns + 1) * mask).amax(1).clamp(min=1)  # (B,)
        return cls(batch, width, (columns < lengths[:, None]).flatten().nonzero()[:, 0])

    @property
    def positions(self) -> torch.Tensor:
        """Position of each token within its own sequence (N,)."""
        return self.indices % self.width

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """(B, T, ...) -> (N, ...)."""
        return padded.flatten(0, 1).index_select(0, self.indices)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """(N, ...) -> (B, T, ...), 0 at padding."""
        shape = (self.batch * self.width, *packed.shape[1:])
        return packed.new_zeros(shape).index_copy(0, self.indices, packed).unflatten(0, (self.batch, self.width))


def enable_packing(model: PreTrainedModel) -> None:
    """Let `model` accept a `packing` in its forward pass; without one, its attention is unchanged."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def packed_hidden(model: PreTrainedModel, input_ids: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Last hidden states (N, H) of right-padded `input_ids` (B, T), computed for the real tokens only."""
    unused = torch.empty(1, 1, 0, 0, device=input_ids.device)  # a 4-D mask, so that transformers builds none; not read
    output = model.model(
        input_ids=packing.pack(input_ids)[None],
        position_ids=packing.positions[None],
        attention_mask=unused,
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
    """transformers' SDPA, or its packed form for query (1, heads, N, D), key and value (1, kv heads, N, D)."""
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    window = options.get("sliding_window")
    assert window is None or window >= packing.width, "packed attention has no sliding window; set train.packing=false"
    rectangles = (packing.unpack(x[0].transpose(0, 1)).transpose(1, 2) for x in (query, key, value))  # (B, heads, T, D)
    attended = torch.nn.functional.scaled_dot_product_attention(
        *rectangles,
        dropout_p=options.get("dropout", 0.0),
        is_causal=True,
        scale=options.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return packing.pack(attended.transpose(1, 2))[None], None
