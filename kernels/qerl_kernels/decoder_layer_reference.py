"""The functions of `decoder_layer` in plain PyTorch on any device, computed as the modules of transformers do."""

from __future__ import annotations

import torch


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `decoder_layer.add_norm`."""
    total = x if delta is None else x + delta
    wide = total.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    out = scaled * (1 + weight.float()) if unit_offset else weight * scaled.to(x.dtype)
    return total, out.to(x.dtype)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As `decoder_layer.swiglu`."""
    return torch.nn.functional.silu(gate) * up


def geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As `decoder_layer.geglu`."""
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def rotate_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    starts: torch.Tensor,
    slot: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """As `decoder_layer.rotate_store`."""
    n, heads, size = len(q), keys.shape[1], keys.shape[3]
    c, s = (table[slot - starts][:, None] for table in (cos, sin))  # (n, 1, D)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * c + torch.cat((-high, low), dim=-1) * s

    keys[:n].index_copy_(2, slot, rotated(k.reshape(n, heads, size))[:, :, None])
    values[:n].index_copy_(2, slot, v.reshape(n, heads, 1, size))
    return rotated(q.reshape(n, -1, size))


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    slot: torch.Tensor,
    scaling: float,
    window: int | None = None,
) -> torch.Tensor:
    """As `decoder_layer.attend`."""
    n, heads = len(q), keys.shape[1]
    slots = torch.arange(keys.shape[2], device=q.device)
    first = starts[:, None] if window is None else starts[:, None].clamp(min=slot - window + 1)
    visible = (slots >= first) & (slots <= slot)  # (n, S)
    grouped = q.view(n, heads, -1, q.shape[-1])  # (n, KV, H / KV, D)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        grouped, keys[:n], values[:n], attn_mask=visible[:, None, None], scale=scaling
    )
    return mixed.reshape(n, -1)
