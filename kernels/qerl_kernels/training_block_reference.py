"""The functions of `training_block` in plain PyTorch on any device, computed as the modules of transformers do."""

from __future__ import annotations

import torch

from qerl_kernels import decoder_layer_reference


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `training_block.add_norm`."""
    return decoder_layer_reference.add_norm(x, delta, weight, epsilon)


def rotate(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int],
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `training_block.rotate`."""
    of_queries, of_keys = heads
    q, k, v = qkv.view(len(qkv), -1, cos.shape[1]).split([of_queries, of_keys, of_keys], dim=1)
    if norms is not None:
        (_, q), (_, k) = (add_norm(x, None, scale, epsilon) for x, scale in zip((q, k), norms, strict=True))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]

    return rotated(q), rotated(k), v.contiguous()


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """As `training_block.swiglu`."""
    return decoder_layer_reference.swiglu(*gate_up.chunk(2, dim=-1))
