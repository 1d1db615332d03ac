"""Adding noise to the norm scales of a model, and taking it out again bit for bit.

QeRL perturbs the two RMSNorm scales of each block, w + Z with Z ~ N(0, sigma^2). Since RMSNorm multiplies by w just
before a linear layer, this equals row-wise multiplicative noise on that layer's weights and needs no tensor of its own.
In BF16 the sum would round small Z away, so the noisy scale is kept in FP32 while it is in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NoiseReport:
    """What was asked for and what really happened to the scales."""

    sigma: float  # asked for
    sigma_realised: float  # root mean square of (perturbed - clean) over all scales, as stored; 0.0 without noise
    norms_perturbed: int  # norms in which at least one scale changed


def block_norms(model: torch.nn.Module, layers: int) -> dict[str, torch.nn.Module]:
    """The two norms of each transformer block, by name: the one before attention and the one before the MLP.

    Raises AssertionError unless exactly 2 * `layers` are found: noise that silently misses layers is the defect that
    this harness exists to avoid.
    """
    wanted = ("input_layernorm", "post_attention_layernorm")
    norms = {name: module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] in wanted}
    assert len(norms) == 2 * layers, (
        f"found {len(norms)} block norms in {type(model).__name__}, expected {2 * layers} "
        f"(two in each of {layers} blocks, named {' and '.join(wanted)})"
    )
    return norms


@contextmanager
def perturbed(norms: dict[str, torch.nn.Module], sigma: float, seed: int) -> Iterator[NoiseReport]:
    """Inside the context every norm's scale w is w + sigma * z in FP32; afterwards it is the very tensor it was.

    `seed` alone decides z (drawn on the CPU in the order of `norms`), so every device and process sees the same noise.
    """
    if sigma == 0.0:
        yield NoiseReport(0.0, 0.0, 0)
        return
    generator = torch.Generator().manual_seed(seed)
    clean = {name: norm.weight for name, norm in norms.items()}
    hooks = []
    squared, count, changed = 0.0, 0, 0
    try:
        for name, norm in norms.items():
            weight = clean[name].detach()
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32).to(weight.device)
            noisy = weight.float() + sigma * noise
            difference = noisy.double() - weight.double()
            squared += float(difference.square().sum())
            count += weight.numel()
            changed += int(bool((difference != 0).any()))
            norm.weight = torch.nn.Parameter(noisy, requires_grad=False)
            hooks.append(norm.register_forward_hook(keep_input_dtype))
        assert changed == len(norms), f"noise of sigma {sigma} changed {changed} of {len(norms)} norms"
        yield NoiseReport(sigma, (squared / count) ** 0.5, changed)
    finally:
        for hook in hooks:
            hook.remove()
        for name, norm in norms.items():
            norm.weight = clean[name]


def keep_input_dtype(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """Forward hook for a norm whose scale is FP32 in a 16-bit model: the layers behind it get what they are used to."""
    return output.to(inputs[0].dtype)
