"""Runs a model in FP32, a block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from qerl_bench.model.policy import Policy

VOCABULARY_ROWS = 8192  # of the head, in FP32 at one time


@contextmanager
def in_float32(policy: Policy) -> Iterator[None]:
    """Context in which the model computes in FP32; a block's parameters are converted while it runs, and no longer."""
    head = policy.model.get_submodule(policy.structure.head)
    with ExitStack() as stack:
        for module, parts in _units(policy):
            converted = _Converted(parts)
            stack.callback(converted.restore)
            for handle in (
                module.register_forward_pre_hook(lambda *_, part=converted: part.convert()),
                module.register_forward_hook(lambda *_, part=converted: part.restore()),
            ):
                stack.callback(handle.remove)
        for module in policy.model.modules():
            if isinstance(module, torch.nn.Embedding):
                replace_forward(stack, module, _float32_embedding(module.forward))
        replace_forward(stack, head, _float32_head(head))
        yield


def _units(policy: Policy) -> Iterator[tuple[torch.nn.Module, list[torch.nn.Module]]]:
    """Blocks with all their parts, and every module outside of them, without embeddings and head."""
    blocks, head = policy.structure.blocks, policy.structure.head
    inside = tuple(f"{block}." for block in blocks)
    for name, module in policy.model.named_modules():
        if name in blocks:
            yield module, list(module.modules())
        elif not (name.startswith(inside) or name == head or isinstance(module, torch.nn.Embedding)):
            yield module, [module]


class _Converted:
    """The 16-bit parameters of modules, while FP32 copies have taken their place."""

    def __init__(self, parts: list[torch.nn.Module]) -> None:
        self.parts = parts
        self.originals: list[tuple[dict[str, Any], str, torch.nn.Parameter]] = []

    def convert(self) -> None:
        for part in self.parts:
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.dtype in (torch.bfloat16, torch.float16):
                    self.originals.append((part._parameters, name, parameter))
        for parameters, name, parameter in self.originals:
            parameters[name] = torch.nn.Parameter(parameter.float(), requires_grad=False)  # PEFT keeps no other tensor

    def restore(self) -> None:
        for parameters, name, parameter in self.originals:
            parameters[name] = parameter
        self.originals.clear()


class _RowsInFloat32(TorchFunctionMode):
    """Rows that are looked up are in FP32, so that an embedding multiplies them by its scale there (Gemma)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.float() if func is torch.nn.functional.embedding else result


def _float32_embedding(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The embedding in FP32, of the rows that are asked for alone."""

    def in_float32(*args: Any, **kwargs: Any) -> torch.Tensor:
        with _RowsInFloat32():
            return forward(*args, **kwargs).float()

    return in_float32


def _float32_head(head: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The head in FP32, a part of the vocabulary at a time."""
    weight, bias = head.get_parameter("weight"), head._parameters.get("bias")

    def forward(x: torch.Tensor) -> torch.Tensor:
        parts = [torch.nn.functional.linear(x, rows.float()) for rows in weight.split(VOCABULARY_ROWS)]
        return torch.cat(parts, -1) if bias is None else torch.cat(parts, -1) + bias.float()

    return forward


def replace_forward(stack: ExitStack, module: torch.nn.Module, forward: Callable[..., torch.Tensor]) -> None:
    module.forward = forward  # type: ignore[method-assign]  # an attribute of this module hides its class's
    stack.callback(delattr, module, "forward")
