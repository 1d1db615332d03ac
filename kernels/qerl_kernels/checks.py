"""Checks that wrappers make before they launch a kernel. Each error says what to do instead."""

from __future__ import annotations

import os

import torch


def interpreting() -> bool:
    """Whether Triton interprets kernels as Python; it decides this when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def require_device(**tensors: torch.Tensor) -> None:
    """Raise ValueError unless all tensors are on one GPU, or on the CPU under Triton's interpreter."""
    devices = {name: tensor.device for name, tensor in tensors.items()}
    first = next(iter(devices.values()))
    if any(device != first for device in devices.values()):
        places = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"all tensors must be on one device, got {places}; move them to one GPU")
    if first.type != "cuda" and not interpreting():
        raise ValueError(
            f"a Triton kernel needs tensors on a GPU, got {first}; use its PyTorch reference on this device, or set "
            "TRITON_INTERPRET=1 to run it as Python"
        )


def require_shape(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], *dtypes: torch.dtype, strided: bool = False
) -> None:
    """Raise ValueError unless `tensor` has this shape (-1 for any length), one of `dtypes`, and is contiguous.

    With `strided`, only the last axis must be contiguous.
    """
    fits = tensor.ndim == len(shape) and all(want in (-1, have) for want, have in zip(shape, tensor.shape, strict=True))
    if not fits:
        raise ValueError(f"{name} must have the shape {shape}, -1 for any length, got {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} must be of {wanted}, got {str(tensor.dtype).removeprefix('torch.')}; convert it")
    if not (tensor.stride(-1) == 1 if strided else tensor.is_contiguous()):
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}; pass {name}.contiguous()")
