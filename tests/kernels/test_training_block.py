"""Norms, rotation and SwiGLU of a training pass: kernels against plain PyTorch, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qerl_kernels import training_block, training_block_reference

Case = tuple[list[torch.Tensor], dict[str, Any]]


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def _add_norm(width: int, added: bool) -> tuple[list[torch.Tensor], list[Any]]:
    """What gets gradients, and the rest."""
    leaves = [_random(5, width, seed=seed) for seed in range(1 + added)]
    return leaves, [*([] if added else [None]), _random(width, seed=3), 1e-5]


def _rotate(size: int, heads: tuple[int, int], normed: bool) -> tuple[list[torch.Tensor], list[Any]]:
    tokens = 18
    angles = _random(tokens, size, seed=1)  # the halves may differ, though in most models they do not
    norms = (_random(size, seed=2), _random(size, seed=3)) if normed else None
    return [_random(tokens, (heads[0] + 2 * heads[1]) * size)], [angles.cos(), angles.sin(), heads, norms, 1e-5]


CASES = {
    **{f"add_norm {w} {added}": ("add_norm", _add_norm(w, added)) for w in (24, 300) for added in (False, True)},
    **{
        f"rotate {size} {heads} {normed}": ("rotate", _rotate(size, heads, normed))
        for size, heads in ((6, (5, 2)), (16, (2, 1)))
        for normed in (False, True)
    },
    "swiglu": ("swiglu", ([4 * _random(3, 1400)], [])),
}


def _moved(value: Any, dtype: torch.dtype, device: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(part, dtype, device) for part in value)
    return value.to(device, dtype) if isinstance(value, torch.Tensor) else value


def _computed(
    module: Any, name: str, leaves: list[torch.Tensor], rest: list[Any], dtype: torch.dtype, device: str
) -> list[torch.Tensor]:
    """Outputs and gradients of inputs that are rounded to `dtype`."""
    inputs = [leaf.to(device, dtype).requires_grad_() for leaf in leaves]
    found = getattr(module, name)(*inputs, *(_moved(value, dtype, device) for value in rest))
    outputs = found if isinstance(found, tuple) else (found,)
    grads = [_random(*output.shape, seed=7 + i).to(dtype).to(device) for i, output in enumerate(outputs)]
    return [*outputs, *torch.autograd.grad(outputs, inputs, grads)]


@pytest.mark.parametrize("case", CASES)
def test_kernels_compute_what_the_reference_does(device: str, case: str) -> None:
    """The reference gets the same rounded numbers in FP64."""
    name, (leaves, rest) = CASES[case]
    for dtype in (torch.float32,) if device == "cpu" else (torch.float32, torch.bfloat16):
        found = _computed(training_block, name, leaves, rest, dtype, device)
        rounded = [leaf.to(dtype).double() for leaf in leaves]
        exact = [_moved(_moved(value, dtype, "cpu"), torch.float64, "cpu") for value in rest]
        wanted = _computed(training_block_reference, name, rounded, exact, torch.float64, "cpu")
        rounding = 2e-2 if dtype == torch.bfloat16 else 2e-6
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == dtype and one.shape == other.shape and one.is_contiguous()
            assert float((one.cpu().double() - other).detach().norm() / other.detach().norm()) < rounding


def test_nothing_is_saved_but_inputs_and_outputs(interpreter: None) -> None:
    """The sum, gate and up are kept by the matmuls around anyway; a rotation without norms keeps the angles only."""
    saved: dict[str, set[int]] = {}
    for case, (name, (leaves, rest)) in CASES.items():
        inputs = [leaf.float().requires_grad_() for leaf in leaves]
        rest = [_moved(value, torch.float32, "cpu") for value in rest]
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            found = getattr(training_block, name)(*inputs, *rest)
        known = [*inputs, *(found if isinstance(found, tuple) else (found,))]
        known += [x for value in rest for x in (value if isinstance(value, tuple) else (value,))]
        known = [x.data_ptr() for x in known if isinstance(x, torch.Tensor)]
        saved[case] = {x.data_ptr() for x in kept}
        assert saved[case] <= set(known)
        if name == "rotate" and rest[3] is None:
            assert inputs[0].data_ptr() not in saved[case]


def test_a_scale_in_training_is_refused() -> None:
    x, scale = torch.randn(2, 8), torch.ones(8, requires_grad=True)
    with pytest.raises(ValueError, match="frozen"):
        training_block.add_norm(x, None, scale, 1e-6)
    with pytest.raises(ValueError, match="frozen"):
        training_block.rotate(torch.randn(2, 24), x, x, (1, 1), (torch.ones(8), scale), 1e-6)
