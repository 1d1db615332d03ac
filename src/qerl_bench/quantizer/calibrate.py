"""Runs calibration text through a model one transformer block at a time, and measures what reaches each linear layer.

Each block receives the outputs of the packed blocks before it, so later layers can correct earlier errors. Memory holds
the hidden states of the text and one block. Nothing is inferred from a model's name: which layers share an input, and
which norm feeds them, is read off the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from qerl_bench.quant.base import BlockFormat
from qerl_bench.quant.linear import PackedLinear, pack_linear, siblings_of
from qerl_core.checks import ConfigError

# (previous, layer): each output of `previous` scales inputs of `layer` and nothing else.
CHAINS = (("v_proj", "o_proj"), ("up_proj", "down_proj"))


@dataclass
class BlockInputs:
    """One batch of calibration text between two blocks of the model."""

    hidden: torch.Tensor  # (B, T, H)
    mask: torch.Tensor  # (B, T), true for real tokens
    arguments: list[dict[str, Any]]  # of each block: positions, attention mask and so on


@dataclass
class InputGroup:
    """The layers of one block that read the same input x (K,), its second moment, and the module that produces it."""

    layers: dict[str, torch.nn.Linear]
    second_moment: torch.Tensor  # mean of x x^T, FP32 (K, K); GPTQ's Hessian
    norm: torch.nn.Module | None = None  # x is its output
    previous: torch.nn.Linear | None = None  # x is linear in its output
    repeats: int = 1  # inputs per output of `previous` (grouped-query attention, head by head)
    head_size: int = 0  # set if repeats > 1
    folded: torch.Tensor | None = None  # the input scales (K,) that were folded into its layers

    def averaged_over_repeats(self, scales: torch.Tensor) -> torch.Tensor:
        """`scales` (K,) with the geometric mean wherever several inputs come from one output of `previous`."""
        if self.repeats == 1:
            return scales
        return self._by_head(scales).log().mean(1, keepdim=True).exp().expand(-1, self.repeats, -1).reshape(-1)

    def _by_head(self, scales: torch.Tensor) -> torch.Tensor:
        assert self.previous is not None and self.head_size > 0
        return scales.view(-1, self.repeats, self.head_size)

    def per_output(self, scales: torch.Tensor) -> torch.Tensor:
        """`scales` (K,) by output of the module that produces x."""
        return self._by_head(scales)[:, 0].reshape(-1) if self.repeats > 1 else scales

    def fold_scales(self, scales: torch.Tensor) -> None:
        """Multiply the layers' weights by the input scales (K,), and divide the module that produces x by them."""
        for linear in self.layers.values():
            linear.weight.copy_(linear.weight.to(torch.float32) * scales)
        if self.norm is not None:
            for parameter in self.norm.parameters(recurse=False):
                parameter.copy_(parameter.to(torch.float32) / scales)
        elif self.previous is not None:
            by_output = self.per_output(scales)
            weight, bias = self.previous.weight, self.previous.bias
            weight.copy_(weight.to(torch.float32) / by_output.unsqueeze(1))
            if bias is not None:
                bias.copy_(bias.to(torch.float32) / by_output)
        self.second_moment = self.second_moment / torch.outer(scales, scales)
        self.folded = scales

    def squared_output_error(self, scales: torch.Tensor, weight_format: BlockFormat) -> float:
        """Mean squared output error, summed over the layers, if they are packed under these input scales (K,)."""
        scaled = {
            name: (linear.weight.detach().to(torch.float32) * scales).to(linear.weight.dtype)
            for name, linear in self.layers.items()
        }
        amax = shared_amax({name: float(weight.abs().max()) for name, weight in scaled.items()})
        errors = []
        for name, weight in scaled.items():
            linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            linear.weight = torch.nn.Parameter(weight, requires_grad=False)
            packed = pack_linear(name, linear, weight_format, amax.get(name))
            assert isinstance(packed, PackedLinear)
            error = packed.dequantized() / scales - self.layers[name].weight.detach().to(torch.float32)
            errors.append(float(((error @ self.second_moment) * error).sum()))
        return sum(errors)


def shared_amax(amax: dict[str, float]) -> dict[str, float]:
    """For each layer that engines fuse with siblings (`FUSED_SIBLINGS`), the largest |w| of all of them."""
    siblings = {name: siblings_of(name) for name in amax}
    return {
        name: max(amax[path] for path in paths if path in amax) for name, paths in siblings.items() if len(paths) > 1
    }


@torch.no_grad()
def first_block_inputs(
    model: Any, blocks: torch.nn.ModuleList, batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[BlockInputs]:
    """The input of the first block, and the arguments that the model passes to each block. The blocks are not run.

    Padding follows the real tokens, so causal attention alone hides it.
    """
    inputs = []
    device = model.get_input_embeddings().weight.device
    for ids, mask in batches:
        calls: list[tuple[torch.Tensor, dict[str, Any]]] = []

        def record(hidden: torch.Tensor, *args: Any, calls: list = calls, **kwargs: Any) -> torch.Tensor:
            assert not args, "this model passes positional arguments to its blocks"
            calls.append((hidden, kwargs))
            return hidden

        with _replaced_forwards(blocks, record):
            model.base_model(input_ids=ids.to(device), use_cache=False)
        assert len(calls) == len(blocks)
        inputs.append(BlockInputs(calls[0][0], mask.to(device), [kwargs for _, kwargs in calls]))
    return inputs


@contextmanager
def _replaced_forwards(blocks: torch.nn.ModuleList, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
    for block in blocks:
        block.forward = forward
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


@torch.no_grad()
def run_block(block: torch.nn.Module, index: int, inputs: BlockInputs) -> torch.Tensor:
    """The block's output hidden states (B, T, H)."""
    output = block(inputs.hidden, **inputs.arguments[index])
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def group_by_input(
    block: torch.nn.Module, index: int, batches: list[BlockInputs], layers: dict[str, torch.nn.Linear]
) -> list[InputGroup]:
    """Run every batch through the block, and group `layers` by their input, in the order in which they are called."""
    leaders: dict[str, str] = {}  # layer -> the first layer with the same input
    sums: dict[str, torch.Tensor] = {}
    norms: dict[str, torch.nn.Module] = {}
    names = {id(linear): name for name, linear in layers.items()}
    # By id of a tensor of this batch: the tensor, kept so that its id is not reused, and who read it first or made it.
    readers: dict[int, tuple[torch.Tensor, str]] = {}
    producers: dict[int, tuple[torch.Tensor, torch.nn.Module]] = {}
    mask = batches[0].mask

    def before_linear(linear: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        (x,) = inputs
        name = names[id(linear)]
        if id(x) in readers:
            leaders[name] = readers[id(x)][1]
            return
        readers[id(x)] = (x, name)
        leaders[name] = name
        if id(x) in producers:
            norms[name] = producers[id(x)][1]
        rows = x[mask].to(torch.float32)  # (M, K)
        sums[name] = sums.get(name, 0) + rows.t() @ rows

    def after_norm(norm: torch.nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            producers[id(output)] = (output, norm)

    hooks = [linear.register_forward_pre_hook(before_linear) for linear in layers.values()]
    hooks += [module.register_forward_hook(after_norm) for module in block.modules() if _scales_channels(module)]
    try:
        for batch in batches:
            mask = batch.mask
            run_block(block, index, batch)
            readers.clear()
            producers.clear()
    finally:
        for hook in hooks:
            hook.remove()
    tokens = sum(int(batch.mask.sum()) for batch in batches)
    groups: dict[str, InputGroup] = {}
    for name, leader in leaders.items():
        if leader not in groups:
            groups[leader] = InputGroup({}, sums[leader] / tokens, norms.get(leader))
        groups[leader].layers[name] = layers[name]
    for group in groups.values():
        _find_previous(group, layers, block)
    return list(groups.values())


def _scales_channels(module: torch.nn.Module) -> bool:
    """Whether all direct parameters of the module are vectors, as those of a norm are."""
    parameters = list(module.parameters(recurse=False))
    return len(parameters) > 0 and all(parameter.dim() == 1 for parameter in parameters)


def _find_previous(group: InputGroup, layers: dict[str, torch.nn.Linear], block: torch.nn.Module) -> None:
    """Set `previous` if the group is the second layer of one of `CHAINS`, in one module and with fitting widths."""
    if group.norm is not None or len(group.layers) != 1:
        return
    ((name, linear),) = group.layers.items()
    parent, _, leaf = name.rpartition(".")
    for previous_leaf, chained_leaf in CHAINS:
        previous = layers.get(f"{parent}.{previous_leaf}" if parent else previous_leaf)
        if leaf != chained_leaf or previous is None or linear.in_features % previous.out_features != 0:
            continue
        repeats = linear.in_features // previous.out_features
        head = getattr(block.get_submodule(parent), "head_dim", 0) if repeats > 1 else 0
        if repeats == 1 or (head and previous.out_features % head == 0):
            group.previous, group.repeats, group.head_size = previous, repeats, head


def require_same_output(before: torch.Tensor, after: torch.Tensor, name: str) -> None:
    """Raise ConfigError if rescaling changed the block's output by more than rounding."""
    change = float((after.float() - before.float()).norm() / before.float().norm().clamp(min=1e-30))
    limit = 20 * torch.finfo(before.dtype).eps
    if not change <= limit:
        raise ConfigError(
            f"{name}: rescaling changed the block's output by {change:.1e} of its norm (rounding explains "
            f"{limit:.0e}); quantizer=awq does not know how this model scales its channels; "
            "use quantizer=gptq or mse"
        )
