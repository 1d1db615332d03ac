"""Where the packed tensors of a model lie in a GPU's memory.

PyTorch takes a GPU's memory in pieces, and returns none in which anything is left. Packing needs much more for a moment
than it leaves behind, and a 72B held 10 GiB more than it needed, probably in such gaps (docs/LOG.md). Therefore a
block's packed tensors move to memory of their own once all else of the block is free: layers that are one matmul later
lie side by side, so that `quant.concat` copies nothing, and the kernels' layout is written over them. Left out:
experts, and layers outside the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from qerl_bench.quant.linear import TENSOR_SCALES, PackedLinear, siblings_of


def place(layers: Mapping[str, PackedLinear]) -> None:
    """Move the packed tensors of `layers`, by name, to memory of their own, those of `FUSED_SIBLINGS` side by side.

    They go through the host's memory. Meanwhile PyTorch returns what it holds of a GPU's memory without using it.
    """
    moved: list[tuple[list[PackedLinear], str, torch.Tensor, torch.device]] = []
    for group in _siblings(layers):
        for name in [name for name in group[0]._buffers if name not in TENSOR_SCALES]:
            tensors = [tensor for layer in group if (tensor := layer._buffers[name]) is not None]
            device, size = tensors[0].device, sum(tensor.nbytes for tensor in tensors)
            host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
            _move(group, name, host)
            moved.append((group, name, host, device))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    for group, name, host, device in moved:
        _move(group, name, torch.empty_like(host, device=device))
    for layer in layers.values():
        layer.owns_memory = True


def _siblings(layers: Mapping[str, PackedLinear]) -> list[list[PackedLinear]]:
    left, groups = dict(layers), []
    for name in layers:
        if name in left:
            groups.append([left.pop(path) for path in siblings_of(name) if path in left])
    return groups


def _move(layers: Sequence[PackedLinear], name: str, memory: torch.Tensor) -> None:
    """Let the tensor `name` of each layer lie in `memory`, uint8 (bytes,), one behind the other."""
    start = 0
    for layer in layers:
        tensor = layer._buffers[name]
        assert tensor is not None
        room = memory.narrow(0, start, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        layer._buffers[name] = room.copy_(tensor)
        start += tensor.nbytes
