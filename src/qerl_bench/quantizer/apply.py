"""Packs a whole model, one transformer block after the other.

With parameters from a checkpoint (`source`), each block is read when its turn comes and only its packed form stays, so
memory peaks at the packed model and one block. Packed are the linear layers of the text decoder, without routers, and
its experts. Left out: calibration of experts and of layers outside the blocks.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch

from qerl_bench.quant.base import BlockFormat, WeightFormat
from qerl_bench.quant.bf16 import BF16
from qerl_bench.quant.error_decomposition import LayerReport, experts_report, layer_report, unpacked_report
from qerl_bench.quant.experts import (
    PackedExperts,
    expert_parameters,
    is_transposed,
    matrices_of,
    matrix_shape,
    pack_experts,
)
from qerl_bench.quant.linear import PackedLinear, resident_bytes
from qerl_bench.quant.matrices import PackedMatrices
from qerl_bench.quant.memory_layout import place
from qerl_bench.quant.packed_share import decoder_blocks, is_linear, routers
from qerl_bench.quantizer.base import Quantizer
from qerl_bench.quantizer.calibrate import (
    first_block_inputs,
    group_by_input,
    require_same_output,
    run_block,
    shared_amax,
)
from qerl_bench.quantizer.calibration import batches
from qerl_bench.quantizer.rescaling import Rescaling
from qerl_bench.quantizer.rtn import RoundToNearest
from qerl_core.checks import naming, require
from qerl_core.process.progress import bar

RTN = RoundToNearest(name="rtn")
UNPACKED = BF16(name="bf16")  # of transformer blocks that stay in 16 bits


class ParameterSource(Protocol):
    """Provides the parameters of a model on the meta device."""

    def fill(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        """Give the parameters `names` of the model their values."""
        ...


class Quantized(NamedTuple):
    """A report on each packed layer, by name and in the model's order, and what the quantizer moved between layers."""

    reports: dict[str, LayerReport]
    rescaling: Rescaling


@torch.no_grad()
def quantize_model(
    model: torch.nn.Module,
    weight_format: WeightFormat,
    skip: Sequence[str] = ("lm_head",),
    quantizer: Quantizer = RTN,
    sequences: Sequence[list[int]] = (),
    source: ParameterSource | None = None,
) -> Quantized:
    """Pack the linear layers and experts of `model` in place, freeing each original.

    Blocks that the format keeps (`BlockFormat.kept`) stay as they are. In the reports the name of an experts parameter
    stands for all its matrices.
    A layer is skipped if an entry of `skip` is its name, a part of its dotted path, or several adjacent parts. Layers
    that engines fuse (`FUSED_SIBLINGS`) share one tensor scale. `sequences` are the token ids of the calibration text.
    Raises ConfigError if the format cannot run here, a width does not fit it, a weight is not finite, or the model has
    packed layers or adapters; before anything is packed, except for weights that `source` has yet to provide.
    """
    prefix, blocks = decoder_blocks(model)
    layers = _layers_to_pack(model, skip, prefix.rpartition(".")[0])
    kept: set[int] = set()
    if packs := isinstance(weight_format, BlockFormat):
        kept = weight_format.kept(len(blocks))
        _check_layers(model, weight_format, [name for name, *_ in layers])
    calibrated = packs and quantizer.calibration is not None
    require(
        not calibrated or len(blocks) > 0,
        f"quantizer={quantizer.name} runs text through the transformer blocks of a model, and {type(model).__name__} "
        "has no list of blocks as long as its config says; use quantizer=rtn or mse",
    )
    experts = next((name for name, *_ in layers if not isinstance(_owner(model, name), torch.nn.Linear)), None)
    require(
        not calibrated or experts is None,
        f"quantizer={quantizer.name} needs the inputs of every layer, and those of the experts in {experts} are not "
        "measured; use quantizer=rtn or mse",
    )
    block_names = [f"{prefix}.{index}" for index in range(len(blocks))]
    layers_of_block = {block: [names for names in layers if names[0].startswith(f"{block}.")] for block in block_names}
    outside = [names for names in layers if not any(names in inside for inside in layers_of_block.values())]
    if source is not None:
        source.fill(model, [name for name, _ in model.named_parameters() if not name.startswith(f"{prefix}.")])
    inputs = first_block_inputs(model, blocks, batches(list(sequences))) if calibrated else []
    reports: dict[str, LayerReport] = {}
    rescaling = Rescaling()
    progress = bar(layers_of_block.items(), f"packing, {weight_format.name} {quantizer.name}", len(blocks), "blocks")
    for index, (name, names) in enumerate(progress):
        block = blocks[index]
        if source is not None:
            source.fill(model, [f"{name}.{parameter}" for parameter, _ in block.named_parameters()])
        second_moments: dict[str, torch.Tensor] = {}
        if packs and calibrated and index not in kept:
            owners = {layer.removeprefix(f"{name}."): _owner(model, layer) for layer, *_ in names}
            linears = {layer: owner for layer, owner in owners.items() if isinstance(owner, torch.nn.Linear)}
            groups = group_by_input(block, index, inputs, linears)
            before = run_block(block, index, inputs[0])
            quantizer.prepare(groups, weight_format)
            require_same_output(before, run_block(block, index, inputs[0]), name)
            rescaling.add(groups, name, block)
            second_moments = {f"{name}.{layer}": group.second_moment for group in groups for layer in group.layers}
        own = UNPACKED if index in kept else weight_format
        reports |= _pack_layers(model, own, quantizer, names, second_moments)
        packed = {layer: owner for layer, *_ in names if isinstance(owner := _owner(model, layer), PackedLinear)}
        if any(buffer.is_cuda for layer in packed.values() for buffer in layer.buffers()):
            place(packed)
        for batch in inputs:
            batch.hidden = run_block(block, index, batch)
        _return_freed_memory()
    reports |= _pack_layers(model, weight_format, quantizer, outside, {})
    return Quantized({name: reports[name] for name, *_ in layers}, rescaling)


def _pack_layers(
    model: torch.nn.Module,
    weight_format: WeightFormat,
    quantizer: Quantizer,
    layers: list[list[str]],
    second_moments: dict[str, torch.Tensor],
) -> dict[str, LayerReport]:
    if not isinstance(weight_format, BlockFormat):
        weights = {name: _weight(model, name) for name, *_ in layers}
        return {name: unpacked_report(weight.nbytes, weight.numel()) for name, weight in weights.items()}
    linears = {name: layer for name, *_ in layers if isinstance(layer := _owner(model, name), torch.nn.Linear)}
    tensor_amax = shared_amax({name: _amax(name, linear.weight) for name, linear in linears.items()})
    reports = {}
    for name, *aliases in layers:
        with naming(name):
            if name not in linears:
                reports[name] = _pack_experts(model, name, weight_format, quantizer)
                continue
            linear, second_moment = linears[name], second_moments.get(name)
            weight = linear.weight.detach()
            packed = quantizer.pack(weight, weight_format, tensor_amax.get(name), second_moment)
            layer = PackedLinear.replacing(linear, weight_format, packed)
            reports[name] = layer_report(weight, layer.dequantized(), resident_bytes(layer), second_moment)
        for path in (name, *aliases):
            model.set_submodule(path, layer)
    return reports


def _pack_experts(model: torch.nn.Module, name: str, weight_format: BlockFormat, quantizer: Quantizer) -> LayerReport:
    """Pack the experts parameter `name`, one expert after the other."""
    experts, parameter = _owner(model, name), _weight(model, name)
    packed = [quantizer.pack(weight, weight_format, None, None) for weight in matrices_of(experts, parameter)]
    stacked = {key: torch.stack([one[key] for one in packed]) for key in packed[0]}
    leaf = name.rpartition(".")[2]
    matrices = PackedMatrices(weight_format, stacked, matrix_shape(experts, leaf), is_transposed(experts))
    pairs = ((weight, matrices.dequantized(expert)) for expert, weight in enumerate(matrices_of(experts, parameter)))
    report = experts_report(pairs, resident_bytes(matrices))
    pack_experts(experts, {leaf: matrices})
    return report


def _return_freed_memory() -> None:
    """Return freed memory to the system; the C library would keep it, in gaps too small for the next block."""
    with suppress(OSError, AttributeError):  # only glibc has this function
        ctypes.CDLL(None).malloc_trim(0)


def _layers_to_pack(model: torch.nn.Module, skip: Sequence[str], decoder: str) -> list[list[str]]:
    """The names of each linear layer and experts parameter below `decoder` that is not skipped, in the model's order.

    One list per layer, with all names that lead to it.
    """
    names: dict[tuple[int, str], list[str]] = {}
    left_out = routers(model)
    for name, module in model.named_modules(remove_duplicate=False):
        require(
            not isinstance(module, PackedLinear | PackedExperts),
            f"{name} is packed already; load the model again to quantize it in another format",
        )
        require(
            not hasattr(module, "base_layer"),
            f"{name} carries an adapter, whose matrices must not be quantized; quantize first, then add adapters",
        )
        if name in left_out or not f"{name}.".startswith(f"{decoder}." if decoder else ""):
            continue
        if is_linear(module) and not any(f".{part}." in f".{name}." for part in skip):
            names.setdefault((id(module), ""), []).append(name)
        for parameter in expert_parameters(module):
            names.setdefault((id(module), parameter), []).append(f"{name}.{parameter}")
    return list(names.values())


def _check_layers(model: torch.nn.Module, weight_format: BlockFormat, names: list[str]) -> None:
    for name in names:
        weight, owner = _weight(model, name), _owner(model, name)
        reason = weight_format.unsupported_reason(weight.device.type)
        require(reason is None, f"{name}: {reason}")
        transposed = weight.dim() == 3 and is_transposed(owner)
        weight_format.check_width(name, weight.shape[-2] if transposed else weight.shape[-1])
        if not weight.is_meta:
            _amax(name, weight)


def _amax(name: str, weight: torch.Tensor) -> float:
    low, high = weight.detach().aminmax()
    amax = max(-float(low), float(high))
    require(
        math.isfinite(amax), f"{name}: the weights hold NaN or infinity, which cannot be packed; repair the checkpoint"
    )
    return amax


def _owner(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """The linear layer `name`, or the module that owns the experts parameter `name`."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return model.get_submodule(name.rpartition(".")[0])


def _weight(model: torch.nn.Module, name: str) -> torch.Tensor:
    """The weight (N, K) of the linear layer `name`, or the 3-D experts parameter `name`."""
    owner = _owner(model, name)
    return owner.weight if isinstance(owner, torch.nn.Linear) else model.get_parameter(name)
