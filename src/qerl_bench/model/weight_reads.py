"""Finds linear layers whose weight a model reads and multiplies by, without calling the layer.

Neither packing nor an adapter reaches such a matmul: state-space mixers do it with the projection of their time steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qerl_bench.quant.packed_weight import PackedWeightRead
from qerl_core.checks import ConfigError


@contextmanager
def weights_read(model: torch.nn.Module, blocks: Iterable[str]) -> Iterator[list[str]]:
    """Context for one forward pass without gradient. Gives the linear layers of `blocks`, by path without an adapter's
    parts, whose weight enters an operation while the layer itself does not run.

    Raises ConfigError, which names the layer, if its weight is packed.
    """
    reads = _WeightReads()
    inside = tuple(f"{block}." for block in blocks)
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and "weight" in module._parameters and path.startswith(inside):
                before, after = reads.watch(module, path.replace(".base_layer", ""))
                stack.callback(module.register_forward_pre_hook(before).remove)
                stack.callback(module.register_forward_hook(after).remove)
        stack.enter_context(reads)
        try:
            yield reads.found
        except PackedWeightRead as error:
            path = next(path for path, module in model.named_modules() if module is error.layer)
            raise ConfigError(
                f"{path.replace('.base_layer', '')}: {type(model).__name__} reads the weight of this layer instead of "
                f"calling it, and quant={error.format_name} has packed it. Use quant=bf16"
            ) from error


class _WeightReads(TorchDispatchMode):
    """Notes the weights that operations get outside of their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: dict[int, str] = {}  # by storage of the weight
        self.running: set[str] = set()
        self.found: list[str] = []

    def watch(self, layer: torch.nn.Linear, path: str) -> tuple[Callable[..., None], Callable[..., None]]:
        """Hooks for before and after the layer runs."""
        self.paths[storage_of(layer.weight)] = path
        return lambda *_: self.running.add(path), lambda *_: self.running.discard(path)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            path = self.paths.get(storage_of(value)) if isinstance(value, torch.Tensor) else None
            if path is not None and path not in self.running and path not in self.found:
                self.found.append(path)
        return func(*args, **(kwargs or {}))


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
