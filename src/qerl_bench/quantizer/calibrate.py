"""Running calibration text through a model one transformer block at a time, and what a quantizer learns from it.

A block sees what the packed blocks before it make of the text, so later layers can answer for earlier errors. Only the
hidden states of the text and one block are needed at a time. Nothing is inferred from a model's name: which layers
share an input, and which norm feeds them, is seen from the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from qerl_bench.checks import ConfigError
from qerl_bench.quant.base import WeightFormat
from qerl_bench.quant.linear import FUSED_SIBLINGS, PackedLinear, pack_linear

# Layers whose input is linear in another layer's output, up to factors that do not depend on it: (before, after).
CHAINS = (("v_proj", "o_proj"), ("up_proj", "down_proj"))


@dataclass
class State:
    """One batch of calibration text on its way through the model."""

    hidden: torch.Tensor  # (B, T, H)
    mask: torch.Tensor  # (B, T), true for real tokens
    arguments: list[dict[str, Any]]  # of each block: positions, attention mask and the like


@dataclass
class Group:
    """The layers of one block that read the same input, the second moment of that input, and what feeds it."""

    layers: dict[str, torch.nn.Linear]
    moment: torch.Tensor  # mean of x x^T, FP32 (K, K)
    norm: torch.nn.Module | None = None  # its output is the input
    previous: torch.nn.Linear | None = None  # the input is linear in its output
    repeats: int = 1  # how many inputs each output of `previous` feeds (grouped-query attention, head by head)
    head_size: int = 0  # known where repeats > 1

    @property
    def foldable(self) -> bool:
        return self.norm is not None or self.previous is not None

    def shared(self, factors: torch.Tensor) -> torch.Tensor:
        """`factors` (K,) made equal wherever several inputs come from one output, as their geometric mean."""
        if self.repeats == 1:
            return factors
        return self._by_head(factors).log().mean(1, keepdim=True).exp().expand(-1, self.repeats, -1).reshape(-1)

    def _by_head(self, factors: torch.Tensor) -> torch.Tensor:
        assert self.previous is not None and self.head_size > 0
        return factors.view(-1, self.repeats, self.head_size)

    def rescale(self, factors: torch.Tensor) -> None:
        """Multiply the layers' inputs by `factors` (K,) in their weights, and divide what feeds them by as much."""
        for linear in self.layers.values():
            linear.weight.copy_(linear.weight.to(torch.float32) * factors)
        if self.norm is not None:
            for parameter in self.norm.parameters(recurse=False):
                parameter.copy_(parameter.to(torch.float32) / factors)
        elif self.previous is not None:
            by_output = self._by_head(factors)[:, 0].reshape(-1) if self.repeats > 1 else factors
            weight, bias = self.previous.weight, self.previous.bias
            weight.copy_(weight.to(torch.float32) / by_output.unsqueeze(1))
            if bias is not None:
                bias.copy_(bias.to(torch.float32) / by_output)
        self.moment = self.moment / torch.outer(factors, factors)

    def losses(self, factors: torch.Tensor, weight_format: WeightFormat) -> list[float]:
        """Mean squared output error of each layer when packed with its inputs multiplied by `factors` (K,)."""
        scaled = {
            name: (linear.weight.detach().to(torch.float32) * factors).to(linear.weight.dtype)
            for name, linear in self.layers.items()
        }
        amax = shared_amax({name: float(weight.abs().max()) for name, weight in scaled.items()})
        found = []
        for name, weight in scaled.items():
            plain = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            plain.weight = torch.nn.Parameter(weight, requires_grad=False)
            packed = pack_linear(name, plain, weight_format, amax.get(name))
            assert isinstance(packed, PackedLinear)
            error = packed.dequantized() / factors - self.layers[name].weight.detach().to(torch.float32)
            found.append(float(((error @ self.moment) * error).sum()))
        return found


def shared_amax(amax: dict[str, float]) -> dict[str, float]:
    """For each layer that runs fused with siblings (`FUSED_SIBLINGS`), the largest |w| of all of them."""
    shared: dict[str, float] = {}
    for siblings in FUSED_SIBLINGS:
        for name in amax:
            parent, _, leaf = name.rpartition(".")
            if leaf in siblings:
                paths = [f"{parent}.{sibling}" if parent else sibling for sibling in siblings]
                shared[name] = max(amax[path] for path in paths if path in amax)
    return shared


def decoder_blocks(model: torch.nn.Module) -> tuple[str, torch.nn.ModuleList] | None:
    """The list of transformer blocks and its name: the first one as long as the config says; None if there is none."""
    count = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return name, module
    return None


@torch.no_grad()
def first_states(
    model: Any, blocks: torch.nn.ModuleList, batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[State]:
    """What reaches the first block, and the arguments that the model passes to each. The blocks are not run.

    Padding sits behind every real token, so causal attention alone keeps it out.
    """
    states = []
    device = model.get_input_embeddings().weight.device
    for ids, mask in batches:
        calls: list[tuple[torch.Tensor, dict[str, Any]]] = []

        def record(hidden: torch.Tensor, *args: Any, calls: list = calls, **kwargs: Any) -> torch.Tensor:
            assert not args, "this model passes positional arguments to its blocks"
            calls.append((hidden, kwargs))
            return hidden

        with _forwards_replaced(blocks, record):
            model.base_model(input_ids=ids.to(device), use_cache=False)
        assert len(calls) == len(blocks)
        states.append(State(calls[0][0], mask.to(device), [kwargs for _, kwargs in calls]))
    return states


@contextmanager
def _forwards_replaced(blocks: torch.nn.ModuleList, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
    for block in blocks:
        block.forward = forward
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


@torch.no_grad()
def run_block(block: torch.nn.Module, index: int, state: State) -> torch.Tensor:
    """The block's output hidden states (B, T, H)."""
    output = block(state.hidden, **state.arguments[index])
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def observe(block: torch.nn.Module, index: int, states: list[State], layers: dict[str, torch.nn.Linear]) -> list[Group]:
    """Run every state through the block and group `layers` by their input, in the order in which they are called."""
    leaders: dict[str, str] = {}  # layer -> the first layer with the same input
    sums: dict[str, torch.Tensor] = {}
    norms: dict[str, torch.nn.Module] = {}
    names = {id(linear): name for name, linear in layers.items()}
    seen: dict[
        int, tuple[torch.Tensor, str]
    ] = {}  # input -> first layer; the tensor is kept so that its id stays taken
    made: dict[int, tuple[torch.Tensor, torch.nn.Module]] = {}  # output -> the norm that made it
    mask = states[0].mask

    def before(linear: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        (x,) = inputs
        name = names[id(linear)]
        if id(x) in seen:
            leaders[name] = seen[id(x)][1]
            return
        seen[id(x)] = (x, name)
        leaders[name] = name
        if id(x) in made:
            norms[name] = made[id(x)][1]
        rows = x[mask].to(torch.float32)  # (M, K)
        sums[name] = sums.get(name, 0) + rows.t() @ rows

    def after(norm: torch.nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            made[id(output)] = (output, norm)

    hooks = [linear.register_forward_pre_hook(before) for linear in layers.values()]
    hooks += [m.register_forward_hook(after) for m in block.modules() if _scales_channels(m)]
    try:
        for state in states:
            mask = state.mask
            run_block(block, index, state)
            seen.clear()
            made.clear()
    finally:
        for hook in hooks:
            hook.remove()
    tokens = sum(int(state.mask.sum()) for state in states)
    groups: dict[str, Group] = {}
    for name, leader in leaders.items():
        if leader not in groups:
            groups[leader] = Group({}, sums[leader] / tokens, norms.get(leader))
        groups[leader].layers[name] = layers[name]
    for group in groups.values():
        _find_previous(group, layers, block)
    return list(groups.values())


def _scales_channels(module: torch.nn.Module) -> bool:
    """Whether the module's own parameters are vectors, as a norm's are."""
    own = list(module.parameters(recurse=False))
    return len(own) > 0 and all(parameter.dim() == 1 for parameter in own)


def _find_previous(group: Group, layers: dict[str, torch.nn.Linear], block: torch.nn.Module) -> None:
    """Set `previous` if the group is one layer behind another of `CHAINS`, in the same module and of fitting width."""
    if group.norm is not None or len(group.layers) != 1:
        return
    ((name, linear),) = group.layers.items()
    parent, _, leaf = name.rpartition(".")
    for before, after in CHAINS:
        previous = layers.get(f"{parent}.{before}" if parent else before)
        if leaf != after or previous is None or linear.in_features % previous.out_features != 0:
            continue
        repeats = linear.in_features // previous.out_features
        head = getattr(block.get_submodule(parent), "head_dim", 0) if repeats > 1 else 0
        if repeats == 1 or (head and previous.out_features % head == 0):
            group.previous, group.repeats, group.head_size = previous, repeats, head


def require_same_output(before: torch.Tensor, after: torch.Tensor, name: str) -> None:
    """Raise ConfigError if rescaling changed what a block computes by more than rounding."""
    change = float((after.float() - before.float()).norm() / before.float().norm().clamp(min=1e-30))
    limit = 20 * torch.finfo(before.dtype).eps
    if not change <= limit:
        raise ConfigError(
            f"{name}: rescaling changed the block's output by {change:.1e} of its norm (rounding explains "
            f"{limit:.0e}); this model family scales its channels in a way that quantizer=awq does not know; "
            "use quantizer=gptq or mse"
        )
