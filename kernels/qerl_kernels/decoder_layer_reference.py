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
    positions: torch.Tensor,
    table: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """As `decoder_layer.rotate_store`."""
    n, (_, heads, page_size, size) = len(q), keys.shape
    c, s = (angles[positions][:, None] for angles in (cos, sin))  # (n, 1, D)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * c + torch.cat((-high, low), dim=-1) * s

    pages = table.gather(1, (positions // page_size)[:, None])[:, 0].long()
    keys[pages, :, positions % page_size] = rotated(k.reshape(n, heads, size))
    values[pages, :, positions % page_size] = v.reshape(n, heads, size)
    return rotated(q.reshape(n, -1, size))


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    prefixes: torch.Tensor,
    clusters: torch.Tensor | None,
    scaling: float,
    window: int | None = None,
) -> torch.Tensor:
    """As `decoder_layer.attend`; who shares a prefix makes no difference here."""
    n, heads = len(q), keys.shape[1]
    key, value = (in_order(x, table) for x in (keys, values))
    at = torch.arange(key.shape[2], device=q.device)
    visible = at <= positions[:, None]  # (n, S)
    if window is not None:
        visible &= at > positions[:, None] - window
    grouped = q.view(n, heads, -1, q.shape[-1])  # (n, KV, H / KV, D)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=visible[:, None, None], scale=scaling
    )
    return mixed.reshape(n, -1)


def in_order(paged: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The keys or values of each row, (n, KV, S, D), from `paged` (pages, KV, PAGE, D) by `table` (n, S / PAGE)."""
    return paged[table.long()].transpose(1, 2).flatten(2, 3)
