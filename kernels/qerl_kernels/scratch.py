"""Buffers that kernels use between their launches, and whose they are.

`scratch` is one buffer for tensors that live no longer than one matmul: a weight in 16 bits, the logits of a chunk of
tokens. The caller may use it until the next request on the same stream; autograd must not save it. It grows to the
largest request and is kept, so training does not allocate hundreds of megabytes again and again. `workspace` holds the
partial sums of a matmul whose programs share an output.

A captured CUDA graph holds the addresses of the buffers that its kernels used. Inside `owned_by` buffers belong to an
owner, which also owns the graphs: nobody else uses or grows them, and they are freed with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch

_buffers: dict[tuple[torch.device, int], torch.Tensor] = {}
_owned: WeakKeyDictionary[object, dict[str, list[torch.Tensor]]] = WeakKeyDictionary()
_owners: list[object] = []
_workspaces: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
_GRAPHS = -1  # key instead of a stream: graphs without an owner share a workspace, so replay one at a time
COUNTERS = 1 << 14  # of a workspace


@contextmanager
def owned_by(owner: object) -> Iterator[None]:
    """Inside the context, buffers of kernels belong to `owner`, which uses one stream of one device at a time."""
    _owners.append(owner)
    try:
        yield
    finally:
        _owners.pop()


def owned(kind: str) -> list[torch.Tensor] | None:
    """All buffers of a kind that the present owner has, to be extended; None outside of `owned_by`."""
    return _owned.setdefault(_owners[-1], {}).setdefault(kind, []) if _owners else None


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor with undefined contents, valid until the next call."""
    size = math.prod(shape) * dtype.itemsize
    kept = owned("scratch")
    if kept is not None:
        if not kept or kept[-1].numel() < size:
            kept.append(_bytes(size, device))  # the old one stays: a graph may hold its address
        return kept[-1][:size].view(dtype).view(shape)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    buffer = _buffers.get((device, stream))
    if buffer is None or buffer.numel() < size:
        _buffers.pop((device, stream), None)
        del buffer
        buffer = _buffers[device, stream] = _bytes(size, device)
    return buffer[:size].view(dtype).view(shape)


def workspace(device: torch.device, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 for `size` partial sums, and COUNTERS counters that are zero between launches.

    They are the owner's, or else the current stream's. Old ones are kept, because a captured graph may hold their
    addresses.
    """
    mine = owned("workspace")
    if mine is not None:
        return _at_least(mine, device, size)
    stream = 0
    if device.type == "cuda":
        for_graphs = _at_least(_workspaces.setdefault((device, _GRAPHS), []), device, size)
        if torch.cuda.is_current_stream_capturing():
            return for_graphs
        stream = torch.cuda.current_stream(device).cuda_stream
    return _at_least(_workspaces.setdefault((device, stream), []), device, size)


def _at_least(kept: list[torch.Tensor], device: torch.device, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Counters and the last workspace in `kept`, after a larger one has been added if it is too small."""
    if not kept or kept[-1].numel() < size:
        with torch.inference_mode(False):
            if not kept:
                kept.append(torch.zeros(COUNTERS, dtype=torch.int32, device=device))
            kept.append(torch.empty(max(size, 1 << 20), dtype=torch.float32, device=device))
    return kept[-1], kept[0]


def _bytes(size: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # so that training can write to a buffer that sampling has allocated
        return torch.empty(size, dtype=torch.uint8, device=device)
