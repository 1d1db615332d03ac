"""Finds out by one forward pass which norms feed which layers, so that nothing depends on an architecture's names.

A norm's output is followed by its storage, and through operations that copy it or scale it as a whole, until a layer
reads it. The residual stream is what enters a block and every sum with it. Left out: norms without a scale, norms that
read anything but the residual stream (of queries and keys, inside MLA or linear attention), and norms whose output is
added to something, as in blocks whose residual stream starts behind the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig, PreTrainedModel

from qerl_bench.model.weight_reads import storage_of, weights_read
from qerl_bench.quant.experts import PackedExperts
from qerl_bench.quant.packed_share import decoder_blocks
from qerl_core.checks import require

TWO_PER_BLOCK = ("llama", "mistral", "qwen2", "qwen3")  # a probe that finds anything else there is wrong
PROBE_TOKENS = 8
aten = torch.ops.aten
# Operations whose result has the channels of its first argument, each as it was.
COPIES = {aten.clone, aten._to_copy, aten.index, aten.index_select, aten.repeat}
SCALINGS = {aten.mul, aten.div}  # the same, if the second argument is one number per token or less


@dataclass(frozen=True)
class NormSite:
    """A norm whose output is the input of layers that multiply it by a matrix."""

    name: str  # module path of the norm in the model
    consumers: tuple[str, ...]  # of those layers (linear, packed, experts, router), in the order they read it
    routers: tuple[str, ...]  # those of `consumers` that choose experts
    offset: float  # 1.0 if the norm multiplies by 1 + w, 0.0 if by w


@dataclass(frozen=True)
class Structure:
    """Where the parts of a causal language model are, as module paths."""

    decoder: str  # the text decoder, such as "model" or "model.language_model"
    blocks: tuple[str, ...]  # its transformer blocks
    sites: tuple[NormSite, ...]  # norms of the residual stream inside blocks, in the model's order
    final: NormSite | None  # the norm that feeds the head
    head: str
    read: tuple[str, ...]  # linear layers of blocks whose weight something else reads and multiplies by


@dataclass
class Reads:
    """What one forward pass showed of a norm."""

    norm: torch.nn.Module
    input: torch.Tensor
    residual: bool  # it read the residual stream
    added: bool = False  # its output became a term of a sum, such as the residual stream
    consumers: list[str] = field(default_factory=list)  # layers that read its output


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The config of the text part; the whole config of a model that has no other part."""
    return model.config.get_text_config(decoder=True)


def block_paths(model: PreTrainedModel) -> tuple[str, ...]:
    """Paths of the transformer blocks, in order. Raises ConfigError if the model has no list of them."""
    path, blocks = decoder_blocks(model)
    require(
        len(blocks) > 0,
        f"model: {type(model).__name__} has no list of {text_config(model).num_hidden_layers} transformer blocks, "
        "as its config says; choose another model",
    )
    return tuple(f"{path}.{index}" for index in range(len(blocks)))


def structure_of(model: PreTrainedModel) -> Structure:
    """The structure of `model`, packed or not, with an adapter or without. Leaves no trace in it.

    Raises ConfigError if the model multiplies by the weight of a packed layer, and AssertionError if a family whose
    blocks have two norms seems to have others.
    """
    blocks = block_paths(model)
    with observed(model, blocks) as reads, weights_read(model, blocks) as read:
        model(input_ids=probe_ids(model)[None], use_cache=False)
    named = {id(module): name for name, module in model.named_modules()}
    head = named[id(model.get_output_embeddings())]
    sites = [site for name, read in reads.items() if (site := _site(model, name, read)) is not None]
    inside = tuple(site for site in sites if site.name.startswith(tuple(f"{block}." for block in blocks)))
    kind = text_config(model).model_type
    assert kind not in TWO_PER_BLOCK or len(inside) == 2 * len(blocks), (
        f"{kind} has two norms per block that feed linear layers, found {len(inside)} in {len(blocks)} blocks: "
        f"{', '.join(site.name for site in inside)}"
    )
    return Structure(
        decoder=blocks[0].rsplit(".", 2)[0],
        blocks=blocks,
        sites=inside,
        final=next((site for site in sites if head in site.consumers), None),
        head=head,
        read=tuple(read),
    )


def routed_experts(model: torch.nn.Module, structure: Structure) -> list[torch.nn.Module]:
    """The modules with the experts that routers choose from, where the router reads a norm."""
    layers = [model.get_submodule(name) for site in structure.sites if site.routers for name in site.consumers]
    return [layer for layer in layers if _experts(_base(layer)) > 0]


def probe_ids(model: PreTrainedModel, tokens: int = PROBE_TOKENS) -> torch.Tensor:
    """`tokens` different token ids, on the model's device, to which its config gives no meaning."""
    config = model.config.to_dict() | text_config(model).to_dict()
    special = {value for key, value in config.items() if "token" in key and isinstance(value, int)}
    chosen = [token for token in range(tokens + len(special)) if token not in special][:tokens]
    return torch.tensor(chosen, device=next(model.parameters()).device)


@contextmanager
def observed(model: torch.nn.Module, blocks: Iterable[str]) -> Iterator[dict[str, Reads]]:
    """Context for one forward pass without gradient. Gives, by path, the norms that ran and the layers they fed."""
    flow = _Flow()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())

        def hook(register: Callable[..., Any], function: Callable[..., Any], **options: bool) -> None:
            stack.callback(register(function, **options).remove)

        def entering(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            flow.mark_residual(_tensors(args, kwargs)[0])

        for block in blocks:
            hook(model.get_submodule(block).register_forward_pre_hook, entering, with_kwargs=True)
        for name, module in _layers(model):
            if isinstance(module._parameters.get("weight"), torch.Tensor) and module.weight.ndim == 1:
                hook(module.register_forward_hook, _after_norm(flow, name))
            elif _has_matrix(module):
                hook(module.register_forward_pre_hook, _before_layer(flow, name), with_kwargs=True)
        stack.enter_context(flow)
        yield flow.reads


def consumers_of(read: Reads) -> tuple[str, ...]:
    """The layers that read a norm's output, without those that only hand it on to a part of themselves."""
    return tuple(n for n in read.consumers if not any(other.startswith(f"{n}.") for other in read.consumers))


class _Flow(TorchDispatchMode):
    """Marks storages during a forward pass: those of the residual stream, and those with the output of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.residual: set[int] = set()
        self.norm: dict[int, str] = {}
        self.reads: dict[str, Reads] = {}  # by norm
        self.kept: list[torch.Tensor] = []  # so that no marked storage is used again

    def mark_residual(self, tensor: torch.Tensor) -> None:
        self.residual.add(storage_of(tensor))
        self.kept.append(tensor)

    def mark_norm(self, tensor: torch.Tensor, name: str) -> None:
        self.norm[storage_of(tensor)] = name
        self.kept.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = func.overloadpacket
        if kind is aten.add:
            terms = [arg for arg in args if isinstance(arg, torch.Tensor)]
            if any(map(self.in_residual, terms)):
                self.mark_residual(result)
            for name in (self.norm.get(storage_of(term)) for term in terms):
                if name is not None:
                    self.reads[name].added = True
        elif kind in COPIES or (kind in SCALINGS and _is_per_token(args[1])):
            if (name := self.norm.get(storage_of(args[0]))) is not None:
                self.mark_norm(result, name)
            if kind in COPIES and self.in_residual(args[0]):
                self.mark_residual(result)
        return result

    def in_residual(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self.residual


def _after_norm(flow: _Flow, name: str) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        source = args[0] if args else None
        if isinstance(output, torch.Tensor) and isinstance(source, torch.Tensor) and output.shape == source.shape:
            flow.reads[name] = Reads(module, source, flow.in_residual(source))
            flow.mark_norm(output, name)

    return hook


def _before_layer(flow: _Flow, name: str) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in _tensors(args, kwargs):
            norm = flow.norm.get(storage_of(tensor))
            if norm is not None and name not in flow.reads[norm].consumers:
                flow.reads[norm].consumers.append(name)

    return hook


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """All modules but the parts of a layer with an adapter."""
    adapted: list[str] = []
    for name, module in model.named_modules():
        if not name.startswith(tuple(adapted)):
            yield name, module
        if hasattr(module, "base_layer"):
            adapted.append(f"{name}.")


def _has_matrix(module: torch.nn.Module) -> bool:
    """Whether `module` itself multiplies by a matrix: a linear layer, packed or adapted, a router, or experts."""
    if isinstance(module, torch.nn.Embedding):
        return False
    if isinstance(module, torch.nn.Linear | PackedExperts) or hasattr(module, "base_layer"):
        return True
    return any(parameter is not None and parameter.ndim >= 2 for parameter in module._parameters.values())


def _site(model: torch.nn.Module, name: str, read: Reads) -> NormSite | None:
    """The norm `name` as a site; None if it is none."""
    readers = consumers_of(read)
    offset = _offset(read.norm, read.input) if readers and read.residual and not read.added else None
    if offset is None:
        return None
    layers = {reader: _base(model.get_submodule(reader)) for reader in readers}
    experts = {reader: count for reader, layer in layers.items() if (count := _experts(layer)) > 0}
    routers = [
        reader for reader, layer in layers.items() if reader not in experts and _outputs(layer) in experts.values()
    ]
    return NormSite(name, readers, tuple(routers), offset)


def _base(layer: torch.nn.Module) -> torch.nn.Module:
    """The layer itself, without its adapter."""
    while hasattr(layer, "base_layer"):
        layer = layer.base_layer  # type: ignore[assignment]
    return layer


def _experts(layer: torch.nn.Module) -> int:
    """The number of experts in `layer`; 0 if it is something else."""
    if isinstance(layer, PackedExperts):
        return layer.num_experts
    stacked = [len(parameter) for parameter in layer.parameters(recurse=False) if parameter.ndim == 3]
    return stacked[0] if stacked else 0


def _outputs(layer: torch.nn.Module) -> int:
    """The width of the output of a layer with one matrix."""
    if isinstance(layer, torch.nn.Linear):
        return layer.out_features
    return next(len(parameter) for parameter in layer.parameters(recurse=False) if parameter.ndim == 2)


@torch.no_grad()
def _offset(norm: torch.nn.Module, x: torch.Tensor) -> float | None:
    """What the norm adds to its weight before it multiplies by it: 0.0 or 1.0; None if it does something else."""
    weight, bias = norm._parameters["weight"], norm._parameters.get("bias")
    assert weight is not None
    try:
        norm._parameters["weight"] = torch.zeros_like(weight)  # type: ignore[assignment]
        at_zero = norm.forward(x).float()
        norm._parameters["weight"] = torch.ones_like(weight)  # type: ignore[assignment]
        normalized = norm.forward(x).float() - at_zero
    finally:
        norm._parameters["weight"] = weight
    shift = at_zero if bias is None else at_zero - bias.float()
    offset = float((shift * normalized).sum() / normalized.square().sum().clamp(min=1e-30))
    return next((known for known in (0.0, 1.0) if abs(offset - known) < 0.02), None)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]


def _is_per_token(factor: Any) -> bool:
    return not isinstance(factor, torch.Tensor) or factor.ndim == 0 or factor.shape[-1] == 1
