"""Linear layers over packed weights: one resident copy that serves rollout and training, and never changes.

The weight is rebuilt for each matmul and dropped again, in the forward and in the backward pass, so training keeps no
16-bit copy of it; with kernels, sampling does not even rebuild it. Merging an adapter into the packed weight is
refused: rounding back to 4 bits would keep only a few per cent of the update. Left out: gradients for weight and bias,
which are frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from qerl_bench.checks import ConfigError
from qerl_bench.quant.base import WeightFormat
from qerl_bench.quant.nf4 import NF4
from qerl_kernels import decode, layout
from qerl_kernels.dequantize import dequantize
from qerl_kernels.training_linear import Adapter, packed_linear

# Checkpoint names of a scale for the whole tensor: (1,), or one for each row of a layer that was joined from several.
TENSOR_SCALES = ("weight_global_scale", "weight_scale_2")
# Inference engines run these layers as one matrix with one tensor scale, and llm-compressor quantizes them with a scale
# in common. Names are those of sibling modules; where a model has none of them, nothing is shared.
FUSED_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))

KERNEL_BUFFERS = ("kernel_words", "kernel_scales")


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
        raise ConfigError(
            f"this layer's weight is packed as {self._format_name} and cannot be read or merged into: rounding back to "
            "4 bits loses most of an adapter's update; keep the adapter apart, or merge it into an unquantized model"
        )


class PackedLinear(torch.nn.Linear):
    """A frozen linear layer whose weight stays packed. Buffers carry the names of the format's checkpoint layout.

    Takes x (..., K) in bfloat16, float16 or float32, returns (..., N) in the same dtype; differentiable in x only.
    Tensor scales are kept as Python numbers, so that a matmul never waits for the device. A layer that was joined from
    parts with tensor scales of their own (`join`) has one for each range of rows, in `row_scales`.
    """

    row_scales: list[tuple[slice, float]]
    _scale_offset: int | None = None  # of the kernels' layout, once that is the resident one

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
        self.row_scales = _row_scales(weight_format, packed)

    @property
    def output_scale(self) -> float:
        """The tensor scale that all rows have in common."""
        ((_, scale),) = self.row_scales
        return scale

    @property
    def weight(self) -> PackedWeight:
        return PackedWeight(self)

    def packed(self) -> dict[str, torch.Tensor]:
        """The packed tensors, by their checkpoint names: the resident ones, or made from the kernels' layout."""
        resident = {name: tensor for name, tensor in self._buffers.items() if tensor is not None}
        laid = self.kernel_weight
        if laid is None:
            return resident
        return layout.unpack(laid) | {name: resident[name] for name in resident if name not in KERNEL_BUFFERS}

    @property
    def kernel_weight(self) -> layout.KernelWeight | None:
        """The weight as the fused kernels read it, after `use_kernels`."""
        if self._scale_offset is None:
            return None
        words, scales = (self._buffers[name] for name in KERNEL_BUFFERS)
        assert words is not None and scales is not None and self.weight_format.kernel_layout is not None
        shape = (self.out_features, self.in_features)
        return layout.KernelWeight(self.weight_format.kernel_layout, shape, words, scales, self._scale_offset)

    @property
    def by_bitsandbytes(self) -> bool:
        """Whether bitsandbytes multiplies, and neither the fused kernels nor their reference."""
        return isinstance(self.weight_format, NF4) and self.weight_format.backend == "bitsandbytes"

    def use_kernels(self) -> None:
        """Lay the packed tensors out for the fused kernels; from then on these are the one resident copy.

        Nothing is lost: `packed` gives the same bits as before. Raises ValueError if the layout cannot hold them.
        """
        if self._scale_offset is not None:
            return
        if self.weight_format.kernel_layout is None:
            raise ValueError(f"the fused kernels have no layout for {self.weight_format}")
        packed = self.packed()
        laid = layout.repack(self.weight_format.kernel_layout, packed, (self.out_features, self.in_features))
        for name in packed.keys() - set(TENSOR_SCALES):
            del self._buffers[name]
        self._buffers.update(zip(KERNEL_BUFFERS, (laid.words, laid.scales), strict=True))
        self._scale_offset = laid.offset

    def operand(self, dtype: torch.dtype) -> torch.Tensor:
        """The matmul operand (N, K), rebuilt on every call."""
        return self.weight_format.operand(self.packed(), (self.out_features, self.in_features), dtype)

    def matmul_operand(self, dtype: torch.dtype) -> torch.Tensor:
        """`operand` for a matmul that follows at once: with kernels, in a buffer that the next call overwrites."""
        laid = self.kernel_weight
        return dequantize(laid) if laid is not None and dtype == torch.bfloat16 else self.operand(dtype)

    def dequantized(self) -> torch.Tensor:
        """The weight (N, K) that this layer multiplies by, in FP32."""
        weight = self.operand(torch.float32)
        for these, scale in self.row_scales:
            weight[these].mul_(scale)
        return weight

    def forward(self, input: torch.Tensor, adapter: Adapter | None = None) -> torch.Tensor:
        """x (..., K) to (..., N), with what `adapter` adds."""
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        if self.by_bitsandbytes:
            assert isinstance(self.weight_format, NF4) and adapter is None  # its adapter is left to PEFT
            shape = (self.out_features, self.in_features)
            return self.weight_format.multiply(input, self.packed(), shape, self.bias)
        laid = self.kernel_weight
        if laid is not None and not torch.is_grad_enabled():
            rows = input.reshape(-1, self.in_features).contiguous()
            if decode.supported(laid, len(rows), input.dtype):
                return self._decoded(laid, rows, adapter).view(*input.shape[:-1], self.out_features)
        return packed_linear(input, self.matmul_operand, self.row_scales, self.bias, adapter)

    def _decoded(self, laid: layout.KernelWeight, rows: torch.Tensor, adapter: Adapter | None) -> torch.Tensor:
        """y (M, N) of a few rows, from the packed weight as it is."""
        scale: float | torch.Tensor
        if len(self.row_scales) == 1:
            scale = self.output_scale
        else:
            scale = torch.empty(self.out_features, device=rows.device)
            for these, value in self.row_scales:
                scale[these] = value
        if adapter is None:
            return decode.decode_gemm(rows, laid, scale, self.bias)
        down, b = rows @ adapter.a.to(rows.dtype).t(), adapter.b.to(rows.dtype)  # (M, r) and (N, r)
        if b.shape[1] > decode.MOST_RANK:
            return decode.decode_gemm(rows, laid, scale, self.bias).addmm_(down, b.t(), alpha=adapter.scaling)
        return decode.decode_gemm(rows, laid, scale, self.bias, (down, b, adapter.scaling))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.weight_format.name}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedLinear:
        """Let `model.to(...)`, `.half()` and the like move the packed tensors but never convert their bits."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, tensor in self._buffers.items():
            was = before[name]
            if tensor is not None and was is not None and tensor.dtype != was.dtype:
                self._buffers[name] = was.to(tensor.device)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.row_scales = _row_scales(self.weight_format, self.packed())


def _row_scales(weight_format: WeightFormat, packed: dict[str, torch.Tensor]) -> list[tuple[slice, float]]:
    """The tensor scale of each range of rows; most layers have one range with all rows."""
    vector = next((name for name in TENSOR_SCALES if name in packed and packed[name].numel() > 1), None)
    if vector is None:
        return [(slice(None), weight_format.output_scale(packed))]
    values, counts = packed[vector].unique_consecutive(return_counts=True)
    ranges, start = [], 0
    for value, count in zip(values, counts.tolist(), strict=True):
        scale = weight_format.output_scale({**packed, vector: value.reshape(1)})
        ranges.append((slice(start, start + count), scale))
        start += count
    return ranges


def join(layers: Sequence[PackedLinear]) -> PackedLinear:
    """One layer whose output is that of `layers` one behind the other, as engines run query, key and value.

    Nothing is rounded again: where the parts have tensor scales of their own, each row keeps its part's.
    """
    first = layers[0]
    assert all(
        layer.weight_format == first.weight_format and layer.in_features == first.in_features for layer in layers
    )
    assert "nested_absmax" not in first.packed(), "the scales of doubly quantized layers are relative to their own mean"
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in first.packed().items():
        parts = [layer.packed()[name] for layer in layers]
        if name in TENSOR_SCALES:
            same = all(torch.equal(part, tensor) for part in parts)
            rows = [part.expand(layer.out_features) for part, layer in zip(parts, layers, strict=True)]
            packed[name] = tensor if same and tensor.numel() == 1 else torch.cat(rows)
        else:
            packed[name] = torch.cat([part.view(torch.uint8) for part in parts]).view(tensor.dtype)
    shape = (sum(layer.out_features for layer in layers), first.in_features)
    return PackedLinear(first.weight_format, packed, shape, _joined_bias(layers)).train(first.training)


def join_in_place(layers: Sequence[PackedLinear]) -> PackedLinear | None:
    """`join` in the kernels' layout without a second copy: the weights of `layers` become views of the joined one.

    None, and nothing has changed, where they are not laid out for the kernels, or not alike.
    """
    first, laid = layers[0], [weight for layer in layers if (weight := layer.kernel_weight) is not None]
    alike = len({(weight.format, weight.shape[1]) for weight in laid}) == 1 and len(laid) == len(layers)
    if not alike or any(layer.out_features % layout.ROWS for layer in layers[:-1]):
        return None
    offset = min(weight.offset for weight in laid)
    for layer, weight in zip(layers, laid, strict=True):
        if weight.offset > offset:  # block scales of MXFP4: from now on relative to the largest of all parts
            weight.scales.sub_(weight.offset - offset)
            layer._scale_offset = offset
    buffers = {name: tensor for name, tensor in first._buffers.items() if tensor is not None}
    for name in KERNEL_BUFFERS:
        parts = [layer.get_buffer(name) for layer in layers]
        buffers[name] = _end_to_end(parts)
        views = buffers[name].split([len(part) for part in parts])
        for layer, view in zip(layers, views, strict=True):
            layer._buffers[name] = view
    shape = (sum(layer.out_features for layer in layers), first.in_features)
    joined = PackedLinear(first.weight_format, buffers, shape, _joined_bias(layers)).train(first.training)
    joined._scale_offset = offset
    joined.row_scales, start = [], 0
    for layer in layers:
        for these, scale in layer.row_scales:
            low, high, _ = these.indices(layer.out_features)
            joined.row_scales.append((slice(start + low, start + high), scale))
        start += layer.out_features
    if len({scale for _, scale in joined.row_scales}) == 1:
        joined.row_scales = [(slice(None), joined.row_scales[0][1])]
    return joined


def join_plain_in_place(layers: Sequence[torch.nn.Linear]) -> torch.nn.Linear | None:
    """`join_in_place` of frozen layers that are not packed, so that no format runs fewer matmuls than another."""
    first = layers[0]
    kinds = {(type(layer), layer.in_features, layer.weight.dtype, layer.weight.requires_grad) for layer in layers}
    if kinds != {(torch.nn.Linear, first.in_features, first.weight.dtype, False)}:
        return None
    weight = _end_to_end([layer.weight.data for layer in layers])
    for layer, rows in zip(layers, weight.split([layer.out_features for layer in layers]), strict=True):
        layer.weight.data = rows
    bias = _joined_bias(layers)
    joined = torch.nn.Linear(first.in_features, len(weight), bias=False, device="meta").train(first.training)
    joined.weight = torch.nn.Parameter(weight, requires_grad=False)
    joined.register_parameter("bias", None if bias is None else torch.nn.Parameter(bias, requires_grad=False))
    return joined


def _end_to_end(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Contiguous `parts` one behind the other along their first axis, without a copy where they lie so already."""
    first = parts[0]
    places = [part.data_ptr() for part in parts]
    ends = [part.data_ptr() + part.nbytes for part in parts]
    size = (sum(len(part) for part in parts), *first.shape[1:])
    if places[1:] == ends[:-1] and ends[-1] <= first.untyped_storage().data_ptr() + first.untyped_storage().nbytes():
        return first.as_strided(size, first.stride(), first.storage_offset())
    with torch.inference_mode(False):  # or what sampling has made could not be moved or trained with
        return torch.cat(list(parts))


def _joined_bias(layers: Sequence[torch.nn.Linear]) -> torch.Tensor | None:
    like = next((layer.bias for layer in layers if layer.bias is not None), None)
    if like is None:
        return None
    return torch.cat([like.new_zeros(m.out_features) if m.bias is None else m.bias.detach() for m in layers])


def pack_linear(
    name: str,
    linear: torch.nn.Linear,
    weight_format: WeightFormat,
    tensor_amax: float | None = None,
    pack: Callable[[torch.Tensor, float | None], dict[str, torch.Tensor]] | None = None,
) -> torch.nn.Linear:
    """The layer `name` with its weight packed; the layer itself for a format that packs nothing.

    `tensor_amax` is that of `WeightFormat.pack`, and `pack` takes the place of that method where it is given. Raises
    ConfigError, naming the layer, if its width does not fit the format or a weight is not finite.
    """
    if weight_format.bits_per_weight is None:
        return linear
    weight_format.check_width(name, linear.in_features)
    try:
        packed = (pack or weight_format.pack)(linear.weight.detach(), tensor_amax)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    shape = (linear.out_features, linear.in_features)
    return PackedLinear(weight_format, packed, shape, linear.bias).train(linear.training)


def resident_bytes(layer: torch.nn.Linear) -> int:
    """Bytes that the layer's weight occupies, scales included, bias not."""
    if isinstance(layer, PackedLinear):
        return sum(tensor.nbytes for tensor in layer.buffers())
    return layer.weight.nbytes
