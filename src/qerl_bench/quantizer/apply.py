"""Packing a whole model, one transformer block after the other.

Where the weights come from a checkpoint folder (`source`), each block is read when its turn comes and only its packed
form stays: the peak is the packed model and one block. Left out: layers outside the blocks get no calibration.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch

from qerl_bench.checks import require
from qerl_bench.progress import bar
from qerl_bench.quant.base import WeightFormat
from qerl_bench.quant.error_decomposition import (
    LayerReport,
    layer_report,
    output_error,
    unpacked_report,
    with_output_error,
)
from qerl_bench.quant.linear import PackedLinear, pack_linear, resident_bytes
from qerl_bench.quantizer.base import Quantizer
from qerl_bench.quantizer.calibrate import (
    Group,
    decoder_blocks,
    first_states,
    observe,
    require_same_output,
    run_block,
    shared_amax,
)
from qerl_bench.quantizer.calibration import batches
from qerl_bench.quantizer.rtn import RoundToNearest

RTN = RoundToNearest(name="rtn")


class Source(Protocol):
    """Where the parameters of a model on the meta device come from."""

    def fill(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        """Give every parameter under the modules `names` its values."""
        ...


@torch.no_grad()
def quantize_model(
    model: torch.nn.Module,
    weight_format: WeightFormat,
    skip: Sequence[str] = ("lm_head",),
    quantizer: Quantizer = RTN,
    sequences: Sequence[list[int]] = (),
    source: Source | None = None,
) -> dict[str, LayerReport]:
    """Pack every linear layer of `model` in place, freeing each original; report each by name, in the model's order.

    A layer is left alone if one of `skip` is its name, a part of its dotted path, or a dotted stretch of it. Layers
    that engines fuse (`FUSED_SIBLINGS`) share one tensor scale. `sequences` are the token ids of the calibration text.
    Raises ConfigError if the format cannot run here, a width does not fit it, a weight is not finite, or the model holds
    packed layers or adapters: before anything is packed, except for weights that `source` has yet to read.
    """
    layers = _layers_to_pack(model, skip)
    if weight_format.bits_per_weight is not None:
        _check(model, weight_format, [name for name, *_ in layers])
    packs = weight_format.bits_per_weight is not None
    found = decoder_blocks(model)
    prefix, blocks = found if found is not None else ("", torch.nn.ModuleList())
    calibrated = packs and quantizer.calibration is not None
    require(
        not calibrated or len(blocks) > 0,
        f"quantizer={quantizer.name} runs text through a model's blocks, and {type(model).__name__} has none that its "
        "config counts; use quantizer=rtn or mse",
    )
    inside = {f"{prefix}.{i}": [n for n in layers if n[0].startswith(f"{prefix}.{i}.")] for i in range(len(blocks))}
    rest = [names for names in layers if not any(names in inner for inner in inside.values())]
    if source is not None:
        source.fill(model, [name for name, _ in model.named_parameters() if not name.startswith(f"{prefix}.")])
    states = first_states(model, blocks, batches(list(sequences))) if calibrated else []
    reports: dict[str, LayerReport] = {}
    for index, (name, names) in enumerate(bar(inside.items(), f"{weight_format.name} {quantizer.name}", len(inside))):
        block = blocks[index]
        if source is not None:
            source.fill(model, [f"{name}.{parameter}" for parameter, _ in block.named_parameters()])
        groups: list[Group] = []
        if calibrated:
            own = {n.removeprefix(f"{name}."): _linear(model, n) for n, *_ in names}
            groups = observe(block, index, states, own)
            before = run_block(block, index, states[0])
            quantizer.prepare(groups, weight_format)
            require_same_output(before, run_block(block, index, states[0]), name)
        moments = {f"{name}.{layer}": group.moment for group in groups for layer in group.layers}
        reports |= _pack(model, weight_format, quantizer, names, moments)
        for state in states:
            state.hidden = run_block(block, index, state)
        _return_freed_memory()
    reports |= _pack(model, weight_format, quantizer, rest, {})
    return {name: reports[name] for name, *_ in layers}


def _pack(
    model: torch.nn.Module,
    weight_format: WeightFormat,
    quantizer: Quantizer,
    layers: list[list[str]],
    moments: dict[str, torch.Tensor],
) -> dict[str, LayerReport]:
    shared: dict[str, float] = {}
    if weight_format.bits_per_weight is not None:
        shared = shared_amax({name: _amax(name, _linear(model, name)) for name, *_ in layers})
    reports = {}
    for name, *aliases in layers:
        original, moment = _linear(model, name), moments.get(name)

        def pack(
            weight: torch.Tensor, amax: float | None, moment: torch.Tensor | None = moment
        ) -> dict[str, torch.Tensor]:
            return quantizer.pack(weight, weight_format, amax, moment)

        layer = pack_linear(name, original, weight_format, shared.get(name), pack)
        reports[name] = report(original, layer, moment)
        for path in (name, *aliases):
            model.set_submodule(path, layer)
    return reports


def report(original: torch.nn.Linear, layer: torch.nn.Linear, moment: torch.Tensor | None = None) -> LayerReport:
    """What packing `original` as `layer` did to its weight, and to its output on inputs with this second moment."""
    size = resident_bytes(layer)
    if not isinstance(layer, PackedLinear):
        return unpacked_report(size, layer.out_features * layer.in_features)
    weight, restored = original.weight.detach(), layer.dequantized()
    found = layer_report(weight, restored, size)
    return found if moment is None else with_output_error(found, output_error(weight, restored, moment))


def _return_freed_memory() -> None:
    """Give freed memory back to the system: the C library keeps it, in holes that the next block may not fit into."""
    with suppress(OSError, AttributeError):  # only the GNU library has this function
        ctypes.CDLL(None).malloc_trim(0)


def _layers_to_pack(model: torch.nn.Module, skip: Sequence[str]) -> list[list[str]]:
    """The names of every linear layer that is not skipped; a module reachable by several names is one entry."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        require(
            not isinstance(module, PackedLinear),
            f"{name} is packed already; load the model again to quantize it in another format",
        )
        require(
            not hasattr(module, "base_layer"),
            f"{name} carries an adapter, whose own matrices must not be quantized; quantize first, then add adapters",
        )
        if isinstance(module, torch.nn.Linear) and not any(f".{part}." in f".{name}." for part in skip):
            names.setdefault(id(module), []).append(name)
    return list(names.values())


def _check(model: torch.nn.Module, weight_format: WeightFormat, names: list[str]) -> None:
    for name in names:
        linear = _linear(model, name)
        reason = weight_format.unsupported_reason(linear.weight.device.type)
        require(reason is None, f"{name}: {reason}")
        weight_format.check_width(name, linear.in_features)
        if not linear.weight.is_meta:
            _amax(name, linear)


def _amax(name: str, linear: torch.nn.Linear) -> float:
    low, high = linear.weight.detach().aminmax()
    amax = max(-float(low), float(high))
    require(
        math.isfinite(amax), f"{name}: the weights hold NaN or infinity, which cannot be packed; repair the checkpoint"
    )
    return amax


def _linear(model: torch.nn.Module, name: str) -> torch.nn.Linear:
    module = model.get_submodule(name)
    assert isinstance(module, torch.nn.Linear), name
    return module
