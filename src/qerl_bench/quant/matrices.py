"""The matrices of a mixture's experts in one parameter, packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from qerl_bench.quant.base import BlockFormat
from qerl_bench.quant.linear import KERNEL_BUFFERS, TENSOR_SCALES, keep_packed_dtypes, resident_kernel_weight
from qerl_kernels import layout
from qerl_kernels.dequantize import dequantize
from qerl_kernels.grouped import FORMATS

_MAX_WEIGHTS = 2**28  # rebuilt at one time: 1 GiB in FP32, and a few times that on the way


class PackedMatrices(torch.nn.Module):
    """One parameter of an experts module: E frozen matrices W (N, K), packed; each has a tensor scale of its own.

    Buffers have the names of the format's checkpoints and one more axis in front, (E, ...). `transposed` tells that the
    model's parameter was (E, K, N).
    """

    _scale_offset: int | None = None  # `KernelWeight.offset`, set once the kernels' layout is the resident one
    kernel_scale: torch.Tensor | None = None  # the tensor scales for the kernels, FP32 (E,); None without any

    def __init__(
        self,
        weight_format: BlockFormat,
        packed: Mapping[str, torch.Tensor],
        shape: tuple[int, int, int],
        transposed: bool,
    ) -> None:
        super().__init__()
        self.weight_format, self.transposed = weight_format, transposed
        self.experts, self.out_features, self.in_features = shape
        self._buffers.update(packed)
        self._read_scales()

    @property
    def device(self) -> torch.device:
        return next(self.buffers()).device

    @property
    def kernel_weight(self) -> layout.KernelWeight | None:
        """The matrix (E * N, K) of all experts as the fused kernels read it, after `use_kernels`."""
        shape = (self.experts * self.out_features, self.in_features)
        return resident_kernel_weight(self, self.weight_format, shape, self._scale_offset)

    def use_kernels(self) -> None:
        """Replace the packed tensors by the layout of the fused kernels, without loss.

        Raises ValueError if the layout cannot hold them, or not every expert in tiles of its own.
        """
        if self._scale_offset is not None:
            return
        kind = self.weight_format.kernel_layout
        if kind is None or kind not in FORMATS or self.out_features % layout.ROWS:
            raise ValueError(f"the fused kernels have no layout for {self.weight_format} and {self.out_features} rows")
        tensors = {name: tensor for name, tensor in self.named_buffers() if name not in TENSOR_SCALES}
        rows = {name: tensor.flatten(0, 1) for name, tensor in tensors.items()}
        repacked = layout.repack(kind, rows, (self.experts * self.out_features, self.in_features))
        for name in tensors:
            del self._buffers[name]
        self._buffers.update(zip(KERNEL_BUFFERS, (repacked.words, repacked.scales), strict=True))
        self._scale_offset = repacked.offset
        if any(name in self._buffers for name in TENSOR_SCALES):
            self.kernel_scale = torch.tensor(self.scales, device=self.device)

    def packed(self, expert: int) -> dict[str, torch.Tensor]:
        """The packed tensors of one expert by their checkpoint names."""
        resident = {name: tensor[expert] for name, tensor in self.named_buffers() if name not in KERNEL_BUFFERS}
        weight = self._kernel_weight_of(expert)
        return resident if weight is None else layout.unpack(weight) | resident

    def operand(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """The matmul operand (N, K) of one expert, without its tensor scale; the next call may overwrite it."""
        weight = self._kernel_weight_of(expert)
        if weight is not None and dtype == torch.bfloat16:
            return dequantize(weight)
        return self.weight_format.operand(self.packed(expert), (self.out_features, self.in_features), dtype)

    def dequantized(self, expert: int) -> torch.Tensor:
        """The weight (N, K) that one expert multiplies by, in FP32."""
        return self.operand(expert, torch.float32).mul_(self.scales[expert])

    def parameter(self, dtype: torch.dtype) -> torch.Tensor:
        """What the model's parameter would be: `dequantized` of all experts at once, rounded to `dtype`."""
        if self._scale_offset is None:
            stacked = torch.stack([self.dequantized(expert).to(dtype) for expert in range(self.experts)])
        else:  # a GPU would wait for the host if each expert had its own calls
            step = max(1, _MAX_WEIGHTS // (self.out_features * self.in_features))
            parts = [self._rebuilt(first, min(step, self.experts - first)) for first in range(0, self.experts, step)]
            stacked = torch.cat([part.to(dtype) for part in parts])
        return stacked.transpose(1, 2) if self.transposed else stacked

    def _rebuilt(self, first: int, count: int) -> torch.Tensor:
        """`dequantized` of `count` experts from `first` on, (count, N, K), from the layout of the kernels."""
        weight = self._kernel_weight_of(first, count)
        assert weight is not None
        rows = self.weight_format.operand(layout.unpack(weight), weight.shape, torch.float32)
        scales = rows.new_tensor(self.scales[first : first + count])
        return rows.view(count, self.out_features, self.in_features).mul_(scales[:, None, None])

    def _kernel_weight_of(self, expert: int, count: int = 1) -> layout.KernelWeight | None:
        """The matrix (count * N, K) of `count` experts from `expert` on."""
        whole = self.kernel_weight
        if whole is None:
            return None
        tiles = self.out_features // layout.ROWS
        part, shape = slice(expert * tiles, (expert + count) * tiles), (count * self.out_features, self.in_features)
        return layout.KernelWeight(whole.format, shape, whole.words[part], whole.scales[part], whole.offset)

    def _read_scales(self) -> None:
        tensors = {name: tensor for name, tensor in self.named_buffers() if name in TENSOR_SCALES}
        if not tensors:
            self.scales = [1.0] * self.experts
            return
        of_expert = [{name: t[expert] for name, t in tensors.items()} for expert in range(self.experts)]
        self.scales = [self.weight_format.output_scale(one) for one in of_expert]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedMatrices:
        with keep_packed_dtypes(self):
            super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._read_scales()

    def extra_repr(self) -> str:
        shape = f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{shape}, format={self.weight_format.name}"
