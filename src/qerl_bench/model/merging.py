"""Base and adapter rounded together: `rollout.merge`, `train.merge` and merged exports.

A layer then multiplies by Q(W + s B A): W is the weight that the adapter is trained beside, packed or in 16 bits, and Q
rounds to nearest in the format of the sampler. The result stays packed until an adapter changes. Where gradients are
asked for they pass straight through: A and B get those of an adapter apart from the base. Fused and recorded passes
know nothing of it. Left out: experts, and adapters with dropout in training, which `train/rollout_checks.py` refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from qerl_bench.model.adapters import block_linears
from qerl_bench.model.kernels import LoRALinear
from qerl_bench.quant.base import BlockFormat, WeightFormat
from qerl_bench.quant.bf16 import BF16
from qerl_bench.quant.linear import PackedLinear, siblings_of
from qerl_bench.quant.packed_share import decoder_blocks
from qerl_bench.quantizer.base import Quantizer
from qerl_bench.quantizer.calibrate import shared_amax
from qerl_core.checks import naming, require

log = logging.getLogger(__name__)
REASON = "base and adapter are rounded together"  # why a fused path is not taken
UNPACKED = BF16(name="bf16")  # of layers that the format leaves in 16 bits
Frozen = Callable[[], torch.Tensor]


class Merging:
    """Rounds base and adapter of the layers in `groups` together while `on`, each group with one tensor scale."""

    def __init__(self, groups: list[Siblings]) -> None:
        self.groups, self.on = groups, False
        for group in groups:
            for path, layer in group.layers.items():
                layer.forward = _MergedForward(self, group, path)  # an attribute of this layer hides its class's

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which base and adapter are rounded together."""
        before, self.on = self.on, True
        try:
            yield
        finally:
            self.on = before

    def layers(self) -> dict[str, torch.nn.Linear]:
        """The merged layers as they are now, by path."""
        return {path: group.merged(path) for group in self.groups for path in group.layers}

    def update_kept(self) -> float:
        """The metric merge/update_kept of the adapter as it is; 1 of a fresh one, which adds nothing."""
        kept, whole = (sum(column) for column in zip(*(group.kept() for group in self.groups), strict=True))
        return kept / whole if whole else 1.0


class Siblings:
    """Adapted layers that share a tensor scale, in the formats of `formats`, merged with `frozen` weights W (N, K)."""

    def __init__(
        self,
        layers: Mapping[str, LoRALinear],
        frozen: Mapping[str, Frozen],
        formats: Mapping[str, WeightFormat],
        quantizer: Quantizer,
    ) -> None:
        self.layers, self.frozen, self.formats, self.quantizer = layers, frozen, formats, quantizer
        self._adapters: list[torch.Tensor] = []  # A and B of each layer, as merged
        self._merged: dict[str, torch.nn.Linear] = {}

    def merged(self, path: str) -> torch.nn.Linear:
        """The layer `path` with its present adapter in its weight."""
        present = [matrix for layer in self.layers.values() for matrix in _matrices(layer)[:2]]
        if not (self._merged and all(map(torch.equal, present, self._adapters))):
            with torch.inference_mode(False), torch.no_grad():
                self._adapters = [matrix.detach().clone() for matrix in present]
                weights = {path: self.frozen[path]() + update for path, update in self._updates().items()}
                self._merged = self._rounded(weights)
        base, merged = self.layers[path].get_base_layer(), self._merged[path]
        if isinstance(base, PackedLinear) and isinstance(merged, PackedLinear):
            merged._kept = None if base._kept is None else merged._kept or {}  # as in `operands_kept`
        return merged

    @torch.no_grad()
    def kept(self) -> tuple[float, float]:
        """<Q(W + D) - Q(W), D> and <D, D> over the layers, with D = s B A."""
        merged, updates = {path: self.merged(path) for path in self.layers}, self._updates()
        bases = self._rounded({path: weight() for path, weight in self.frozen.items()})
        pairs = [(_weight(merged[path]) - _weight(bases[path]), update) for path, update in updates.items()]
        return sum(float((left * right).sum()) for left, right in pairs), sum(float(d.square().sum()) for _, d in pairs)

    def _updates(self) -> dict[str, torch.Tensor]:
        """s B A (N, K) of each layer, in FP32."""
        matrices = {path: _matrices(layer) for path, layer in self.layers.items()}
        return {path: scaling * (b.float() @ a.float()) for path, (a, b, scaling) in matrices.items()}

    def _rounded(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.nn.Linear]:
        """The layers with the FP32 `weights` (N, K) in their formats."""
        amax = shared_amax({path: float(weight.abs().max()) for path, weight in weights.items()})
        return {path: self._layer(path, weight, amax.get(path)) for path, weight in weights.items()}

    def _layer(self, path: str, weight: torch.Tensor, amax: float | None) -> torch.nn.Linear:
        base, weight_format = self.layers[path].get_base_layer(), self.formats[path]
        assert isinstance(base, torch.nn.Linear)
        if not isinstance(weight_format, BlockFormat):
            merged = torch.nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
            merged.weight = torch.nn.Parameter(weight.to(base.weight.dtype), requires_grad=False)
            merged.bias = base.bias
            return merged
        with naming(path):
            packed = PackedLinear.replacing(base, weight_format, self.quantizer.pack(weight, weight_format, amax, None))
        if isinstance(base, PackedLinear):
            packed.rounding = base.rounding
            if base.multiplies_fp8 and weight_format.kernel_layout == base.weight_format.kernel_layout:
                packed.use_fp8()
        return packed


class _MergedForward:
    """The forward pass of an adapted layer, merged while `merging` is on and its adapter is."""

    def __init__(self, merging: Merging, group: Siblings, path: str) -> None:
        self.merging, self.group, self.path = merging, group, path

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        layer = self.group.layers[self.path]
        if not self.merging.on or layer.disable_adapters:
            return type(layer).forward(layer, x, *args, **kwargs)
        y = self.group.merged(self.path)(x)
        if not torch.is_grad_enabled():
            return y
        a, b, scaling = _matrices(layer)
        apart = scaling * (x.detach().to(a.dtype) @ a.t() @ b.t())
        return y + (apart - apart.detach()).to(y.dtype)  # adds 0, and the gradient of A and B


def merging_of(
    model: torch.nn.Module, weight_format: WeightFormat, quantizer: Quantizer, where: str, like: torch.nn.Module | None
) -> Merging:
    """The merging, not yet on, of the adapted layers of `model` into `weight_format`, W from `like` if it is given.

    Layers that the format does not pack become W + s B A in the dtype of their weight. Raises ConfigError, which names
    the model `where`, for adapters of experts, and if adapters leave out a layer that shares a tensor scale.
    """
    adapted: dict[str, Any] = {name: one for name, one in model.named_modules() if isinstance(one, LoraLayer)}
    other = next((name for name, layer in adapted.items() if not isinstance(layer, LoRALinear)), None)
    require(
        other is None,
        f"rollout.merge=true rounds base and adapter of linear layers together, and {other} of {where} is none: use "
        "lora.experts=false, or rollout.merge=false",
    )
    if isinstance(weight_format, BlockFormat) and weight_format.tensor_scale:
        _require_siblings(model, adapted)
    formats = _formats(model, weight_format, adapted)
    owner = model if like is None else like
    groups: dict[tuple[str, ...], list[str]] = {}
    for path in adapted:
        groups.setdefault(siblings_of(path), []).append(path)
    log.info("%d adapted layers are merged into %s; fused blocks and recorded passes are off", len(adapted), where)
    return Merging(
        [
            Siblings(
                {path: adapted[path] for path in paths},
                {path: partial(_weight, owner.get_submodule(path).get_base_layer()) for path in paths},  # type: ignore[operator]
                {path: formats.get(path, UNPACKED) for path in paths},
                quantizer,
            )
            for paths in groups.values()
        ]
    )


def _require_siblings(model: torch.nn.Module, adapted: Mapping[str, object]) -> None:
    there = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    apart = sorted({one for path in adapted for one in siblings_of(path)} & there - adapted.keys())
    require(
        not apart,
        f"rollout.merge=true gives layers that share a tensor scale a new one, and lora.targets leaves out {apart[:1]}:"
        " use lora.targets=all, or a format without tensor scales, such as mxfp4",
    )


def _formats(
    model: torch.nn.Module, weight_format: WeightFormat, adapted: Mapping[str, Any]
) -> dict[str, WeightFormat]:
    """The layers of `model` that `weight_format` packs: those of the blocks, and others that are packed now.

    Raises ConfigError if one of them is not in that format now, nor among the `adapted`.
    """
    if not isinstance(weight_format, BlockFormat):
        return {}
    prefix, blocks = decoder_blocks(model)
    kept = tuple(f"{prefix}.{index}." for index in weight_format.kept(len(blocks)))
    packed = {
        name.removesuffix(".base_layer"): getattr(layer, "weight_format", None)
        for name, layer in block_linears(model).items()
        if not (".lora_" in name or name.startswith(kept))
    }
    apart = [name for name in packed if name not in adapted and packed[name] != weight_format]
    require(
        not apart,
        f"rollout.merge=true rounds layers to {weight_format.name} with their adapters, and lora.targets leaves out "
        f"{', '.join(apart[:3])}, which are in another format: use lora.targets=all, or quant={weight_format.name}",
    )
    outside = {path for path, layer in adapted.items() if isinstance(layer.get_base_layer(), PackedLinear)}
    return dict.fromkeys({*packed, *outside}, weight_format)


def _matrices(layer: LoRALinear) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A (r, K), B (N, r) and s of the one adapter of a layer."""
    (name,) = layer.active_adapters
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return a, b, layer.scaling[name]


def _weight(layer: Any) -> torch.Tensor:
    """The weight (N, K) that a layer multiplies by, in FP32."""
    return layer.dequantized() if isinstance(layer, PackedLinear) else layer.weight.detach().float()
