"""Linear layers over packed weights: one resident copy that serves rollout and training, and never changes.

The weight is rebuilt for each matmul and dropped again, in the forward and in the backward pass, so training keeps no
16-bit copy of it. Merging an adapter into the packed weight is refused: rounding back to 4 bits would keep only a few
per cent of the update. Left out: fused kernels, and gradients for weight and bias, which are frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qerl_bench.errors import BadInput, require
from qerl_bench.quant.base import WeightFormat

# Inference engines run these layers as one matrix with one tensor scale, and llm-compressor quantizes them with a scale
# in common. Names are those of sibling modules; where a model has none of them, nothing is shared.
FUSED_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


class _PackedMatmul(torch.autograd.Function):
    """y = output_scale * (x @ operand^T) + bias, the scale applied in the FP32 epilogue of one matmul."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
        ctx.layer = layer
        ctx.shape = x.shape
        rows = x.reshape(-1, layer.in_features)
        operand = layer.operand(x.dtype)  # (N, K)
        if layer.bias is None:
            y = torch.addmm(rows.new_zeros(1), rows, operand.t(), beta=0, alpha=layer.output_scale)
        else:
            y = torch.addmm(layer.bias.to(x.dtype), rows, operand.t(), alpha=layer.output_scale)
        return y.view(*x.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        layer: PackedLinear = ctx.layer
        (grad_y,) = grads
        rows = grad_y.reshape(-1, layer.out_features)
        operand = layer.operand(grad_y.dtype)  # (N, K)
        grad_x = torch.addmm(rows.new_zeros(1), rows, operand, beta=0, alpha=layer.output_scale)
        return grad_x.view(ctx.shape), None


class PackedWeight:
    """What `PackedLinear.weight` gives: enough to ask where and what the weight is, an error for its values.

    PEFT reads `weight.device` to place an adapter and adds to `weight.data` to merge one.
    """

    def __init__(self, layer: PackedLinear) -> None:
        tensor = next(layer.buffers())
        self.device, self.dtype = tensor.device, tensor.dtype
        self.shape = torch.Size((layer.out_features, layer.in_features))
        self._format_name = layer.weight_format.name

    @property
    def data(self) -> torch.Tensor:
        raise BadInput(
            f"this layer's weight is packed as {self._format_name} and cannot be read or merged into: rounding back to "
            "4 bits loses most of an adapter's update; keep the adapter apart, or merge it into an unquantized model"
        )


class PackedLinear(torch.nn.Linear):
    """A frozen linear layer whose weight stays packed. Buffers carry the names of the format's checkpoint layout.

    Takes x (..., K) in bfloat16, float16 or float32, returns (..., N) in the same dtype; differentiable in x only.
    `output_scale` is kept as a Python number, so that a matmul never waits for the device.
    """

    output_scale: float

    def __init__(
        self,
        weight_format: WeightFormat,
        packed: dict[str, torch.Tensor],
        shape: tuple[int, int],
        bias: torch.Tensor | None,
    ) -> None:
        torch.nn.Module.__init__(self)  # not Linear's, which would allocate and initialise a full weight
        self.out_features, self.in_features = shape
        self.weight_format = weight_format
        frozen_bias = None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", frozen_bias)
        # Not register_buffer, which refuses NF4's "weight" because the class has a property of that name.
        self._buffers.update(packed)
        self.output_scale = weight_format.output_scale(packed)

    @property
    def weight(self) -> PackedWeight:
        return PackedWeight(self)

    def packed(self) -> dict[str, torch.Tensor]:
        """The resident tensors, by their checkpoint names."""
        return {name: tensor for name, tensor in self._buffers.items() if tensor is not None}

    def operand(self, dtype: torch.dtype) -> torch.Tensor:
        """The matmul operand (N, K), rebuilt on every call."""
        return self.weight_format.operand(self.packed(), (self.out_features, self.in_features), dtype)

    def dequantized(self) -> torch.Tensor:
        """The weight (N, K) that this layer multiplies by, in FP32."""
        return self.operand(torch.float32).mul_(self.output_scale)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        return _PackedMatmul.apply(input, self)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.weight_format.name}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedLinear:
        """Let `model.to(...)`, `.half()` and the like move the packed tensors but never convert their bits."""
        before = self.packed()
        super()._apply(fn, recurse)
        for name, tensor in self.packed().items():
            if tensor.dtype != before[name].dtype:
                self._buffers[name] = before[name].to(tensor.device)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.output_scale = self.weight_format.output_scale(self.packed())


def pack_linear(
    name: str, linear: torch.nn.Linear, weight_format: WeightFormat, tensor_amax: float | None = None
) -> torch.nn.Linear:
    """The layer `name` with its weight packed; the layer itself for a format that packs nothing.

    `tensor_amax` is that of `WeightFormat.pack`. Raises BadInput, naming the layer, if its width does not fit the
    format or a weight is not finite.
    """
    if weight_format.bits_per_weight is None:
        return linear
    weight_format.check_width(name, linear.in_features)
    try:
        packed = weight_format.pack(linear.weight.detach(), tensor_amax)
    except BadInput as error:
        raise BadInput(f"{name}: {error}") from error
    shape = (linear.out_features, linear.in_features)
    return PackedLinear(weight_format, packed, shape, linear.bias).train(linear.training)


def resident_bytes(layer: torch.nn.Linear) -> int:
    """Bytes that the layer's weight occupies, scales included, bias not."""
    if isinstance(layer, PackedLinear):
        return sum(tensor.nbytes for tensor in layer.packed().values())
    return layer.weight.nbytes


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """What became of one layer: resident bytes of its weight, 8 * bytes / (N*K), and ||W - W'|| / ||W|| (Frobenius)."""

    bytes: int
    bits_per_weight: float
    relative_error: float


def _report(original: torch.nn.Linear, layer: torch.nn.Linear) -> LayerReport:
    size = resident_bytes(layer)
    error = 0.0
    if isinstance(layer, PackedLinear):
        weight = original.weight.detach().to(torch.float32)
        norm = float(weight.norm())
        error = float((layer.dequantized() - weight).norm()) / norm if norm > 0 else 0.0
    return LayerReport(
        bytes=size,
        bits_per_weight=8 * size / (layer.out_features * layer.in_features),
        relative_error=error,
    )


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


def _amax(name: str, linear: torch.nn.Linear) -> float:
    low, high = linear.weight.detach().aminmax()
    amax = max(-float(low), float(high))
    require(
        math.isfinite(amax), f"{name}: the weights hold NaN or infinity, which cannot be packed; repair the checkpoint"
    )
    return amax


def _shared_amax(amax: dict[str, float]) -> dict[str, float]:
    """For each layer that runs fused with siblings, the largest |w| of all of them."""
    shared: dict[str, float] = {}
    for siblings in FUSED_SIBLINGS:
        for name in amax:
            parent, _, leaf = name.rpartition(".")
            if leaf in siblings:
                paths = [f"{parent}.{sibling}" if parent else sibling for sibling in siblings]
                shared[name] = max(amax[path] for path in paths if path in amax)
    return shared


@torch.no_grad()
def quantize_model(
    model: torch.nn.Module, weight_format: WeightFormat, skip: Sequence[str] = ("lm_head",)
) -> dict[str, LayerReport]:
    """Pack every linear layer of `model` in place, one after the other, freeing each original; report each by name.

    A layer is left alone if one of `skip` is its name, a part of its dotted path, or a dotted stretch of it. Layers
    that engines fuse (`FUSED_SIBLINGS`) share one tensor scale. Raises BadInput before anything is packed if the format
    cannot run here, a width does not fit it, a weight is not finite, or the model holds packed layers or adapters.
    """
    layers = _layers_to_pack(model, skip)
    amax: dict[str, float] = {}
    if weight_format.bits_per_weight is not None:
        for name, *_ in layers:
            linear = _linear(model, name)
            reason = weight_format.unsupported_reason(linear.weight.device.type)
            require(reason is None, f"{name}: {reason}")
            weight_format.check_width(name, linear.in_features)
            amax[name] = _amax(name, linear)
    shared = _shared_amax(amax)
    reports: dict[str, LayerReport] = {}
    for name, *aliases in layers:
        original = _linear(model, name)
        layer = pack_linear(name, original, weight_format, shared.get(name))
        reports[name] = _report(original, layer)
        for path in (name, *aliases):
            model.set_submodule(path, layer)
    return reports


def _linear(model: torch.nn.Module, name: str) -> torch.nn.Linear:
    module = model.get_submodule(name)
    assert isinstance(module, torch.nn.Linear), name
    return module
