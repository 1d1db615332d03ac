"""Concatenating the rows of linear layers with the same input, so that query, key and value take one matmul."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qerl_bench.quant.linear import FP8_BUFFERS, KERNEL_BUFFERS, PackedLinear
from qerl_kernels import layout


def concat_rows_in_place(layers: Sequence[torch.nn.Linear]) -> torch.nn.Linear | None:
    """One layer whose output is the concatenated output of `layers`, whose weights become views of the new weight.

    Nothing is rounded again: rows keep the tensor scale of their layer. Returns None, and changes nothing, unless all
    layers are packed in the same kernel layout, or multiply FP8, or all are plain frozen layers of one dtype.
    """
    packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
    if not packed:
        return _concat_plain(layers)
    if len(packed) < len(layers):
        return None
    in_fp8 = all(layer.multiplies_fp8 for layer in packed)
    return _concat_packed(packed, FP8_BUFFERS) if in_fp8 else _concat_in_layout(packed)


def _concat_in_layout(layers: Sequence[PackedLinear]) -> PackedLinear | None:
    weights = [weight for layer in layers if (weight := layer.kernel_weight) is not None]
    same_kind = len({(w.format, w.shape[1], w.scales.dtype) for w in weights}) == 1 and len(weights) == len(layers)
    if not same_kind:
        return None
    rows = max(layout.ROWS, layout.block_rows(weights[0].format))
    if any(layer.out_features % rows for layer in layers[:-1]):
        return None
    offset = min(weight.offset for weight in weights)
    for layer, weight in zip(layers, weights, strict=True):
        if weight.offset > offset:  # MXFP4 scales become relative to the largest scale of all layers
            weight.scales.sub_(weight.offset - offset)
            layer._scale_offset = offset
    whole = _concat_packed(layers, KERNEL_BUFFERS)
    whole._scale_offset = offset
    return whole


def _concat_packed(layers: Sequence[PackedLinear], names: Sequence[str]) -> PackedLinear:
    first = layers[0]
    buffers = {name: tensor for name, tensor in first._buffers.items() if tensor is not None}
    for name in names:
        parts = [tensor for layer in layers if (tensor := layer._buffers[name]) is not None]
        buffers[name] = _concat_contiguous(parts)
        views = buffers[name].split([len(part) for part in parts])
        for layer, view in zip(layers, views, strict=True):
            layer._buffers[name] = view
    shape = (sum(layer.out_features for layer in layers), first.in_features)
    whole = PackedLinear(first.weight_format, buffers, shape, _concat_bias(layers)).train(first.training)
    whole.rounding, whole._fp8_scales = first.rounding, first._fp8_scales
    whole.row_scales, start = [], 0
    for layer in layers:
        for rows, scale in layer.row_scales:
            low, high, _ = rows.indices(layer.out_features)
            whole.row_scales.append((slice(start + low, start + high), scale))
        start += layer.out_features
    if len({scale for _, scale in whole.row_scales}) == 1:
        whole.row_scales = [(slice(None), whole.row_scales[0][1])]
    return whole


def _concat_plain(layers: Sequence[torch.nn.Linear]) -> torch.nn.Linear | None:
    """Unpacked layers too, so that every format runs the same number of matmuls."""
    first = layers[0]
    kinds = {(type(layer), layer.in_features, layer.weight.dtype, layer.weight.requires_grad) for layer in layers}
    if kinds != {(torch.nn.Linear, first.in_features, first.weight.dtype, False)}:
        return None
    weight = _concat_contiguous([layer.weight.data for layer in layers])
    for layer, rows in zip(layers, weight.split([layer.out_features for layer in layers]), strict=True):
        layer.weight.data = rows
    bias = _concat_bias(layers)
    whole = torch.nn.Linear(first.in_features, len(weight), bias=False, device="meta").train(first.training)
    whole.weight = torch.nn.Parameter(weight, requires_grad=False)
    whole.register_parameter("bias", None if bias is None else torch.nn.Parameter(bias, requires_grad=False))
    return whole


def _concat_contiguous(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Contiguous `parts` concatenated along their first axis; no copy if they already follow each other in memory."""
    first = parts[0]
    starts = [part.data_ptr() for part in parts]
    ends = [part.data_ptr() + part.nbytes for part in parts]
    size = (sum(len(part) for part in parts), *first.shape[1:])
    if starts[1:] == ends[:-1] and ends[-1] <= first.untyped_storage().data_ptr() + first.untyped_storage().nbytes():
        return first.as_strided(size, first.stride(), first.storage_offset())
    with torch.inference_mode(False):  # inference tensors could not be moved or trained with later
        return torch.cat(list(parts))


def _concat_bias(layers: Sequence[torch.nn.Linear]) -> torch.Tensor | None:
    like = next((layer.bias for layer in layers if layer.bias is not None), None)
    if like is None:
        return None
    return torch.cat([like.new_zeros(m.out_features) if m.bias is None else m.bias.detach() for m in layers])
