"""Tensors that are cut among ranks (FSDP2's DTensors) and whole ones: from each to the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

Tree = TypeVar("Tree")
REASON = "the base is sharded"  # why something is left out


def is_cut(tensor: object) -> bool:
    return isinstance(tensor, DTensor)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tree: Tree, kept: bool = True) -> Tree:
    """`tree`, of dicts and lists, with the tensors that are cut whole and on the host; empty ones if not `kept`.

    All ranks call this together, and one tensor after the other is gathered.
    """
    given: Any = tree
    if isinstance(given, DTensor):
        with torch.no_grad():
            gathered = given.full_tensor()
        given = gathered.cpu() if kept else gathered.new_empty(0)
    elif isinstance(given, dict):
        given = {key: whole(value, kept) for key, value in given.items()}
    elif isinstance(given, (list, tuple)):
        given = [whole(value, kept) for value in given]
    return given


def cut_like(value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of `value`, which all ranks have whole, if `tensor` of the same shape is cut; else `value`."""
    if not isinstance(tensor, DTensor) or value.shape != tensor.shape:
        return value
    own = value.to(tensor.device, tensor.dtype)
    return distribute_tensor(own, tensor.device_mesh, tensor.placements, src_data_rank=None)


def own_parts(values: Mapping[str, torch.Tensor], here: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`cut_like` for each of `values` that is `here` by its name."""
    return {name: cut_like(value, here.get(name, value)) for name, value in values.items()}
