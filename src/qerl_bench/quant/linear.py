"""Linear layers over packed weights: one frozen copy that serves rollout and training.

Each matmul rebuilds the weight and frees it again, in the forward and in the backward pass, so training keeps no 16-bit
copy; the decode kernel reads the packed weight directly. PEFT cannot merge an adapter into the packed weight: rounding
back to 4 bits would keep only a few per cent of the update. Left out: gradients of weight and bias, which are frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from qerl_bench.quant.base import BlockFormat, WeightFormat
from qerl_bench.quant.packed_weight import PackedWeight, is_sharded, stored
from qerl_core.checks import naming
from qerl_kernels import decode, fp8, layout, projection
from qerl_kernels.dequantize import dequantize
from qerl_kernels.training_linear import Adapter, JoinedAdapters, down, packed_linear, plus_adapter

# Checkpoint names of tensor scales, (1,).
TENSOR_SCALES = ("weight_global_scale", "weight_scale_2")
# Sibling layers that inference engines run as one matrix; as in llm-compressor, they share one tensor scale. The last
# three are those of vLLM: DeepSeek's latent attention, and the linear attention of Qwen3.5. Names, since nothing in a
# model says what an engine fuses; a layer under another name has a scale of its own.
FUSED_SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)

KERNEL_BUFFERS = ("kernel_words", "kernel_scales")
FP8_BUFFERS = ("weight", "weight_scale")  # those of the format itself


def siblings_of(path: str) -> tuple[str, ...]:
    """The paths of the layers that engines run as one matrix with the layer `path`, itself included."""
    parent, dot, leaf = path.rpartition(".")
    names = next((names for names in FUSED_SIBLINGS if leaf in names), (leaf,))
    return tuple(f"{parent}{dot}{name}" for name in names)


def resident_kernel_weight(
    module: torch.nn.Module, weight_format: BlockFormat, shape: tuple[int, int], offset: int | None
) -> layout.KernelWeight | None:
    """The weight in the kernels' layout, from the buffers of `module`; None without `offset`: it is not resident."""
    if offset is None:
        return None
    words, scales = map(stored(module).__getitem__, KERNEL_BUFFERS)
    assert weight_format.kernel_layout is not None
    return layout.KernelWeight(weight_format.kernel_layout, shape, words, scales, offset)


class PackedLinear(torch.nn.Linear):
    """A frozen linear layer whose weight stays packed. Its buffers have the names of the format's checkpoints.

    Takes x (..., K) in bfloat16, float16 or float32, returns (..., N) in the same dtype; differentiable in x only.
    `row_scales` holds the tensor scale of each range of rows as a Python number, so that a matmul never waits for the
    device; only layers made by `quant.concat` have more than one range.
    """

    row_scales: list[tuple[slice, float]]
    _scale_offset: int | None = None  # `KernelWeight.offset`, set once the kernels' layout is the resident one
    owns_memory = False  # set by `quant.memory_layout`: nobody else reads the packed tensors, which may be overwritten
    rounding: Any = None  # of the input: `activations.Rounding`
    _fp8_scales: torch.dtype | None = None  # what the scales are in checkpoints, after `use_fp8`
    _kept: dict[torch.dtype, torch.Tensor] | None = None  # operands by dtype: `operands_kept`, `keep_operand`

    def __init__(
        self,
        weight_format: BlockFormat,
        packed: dict[str, torch.Tensor],
        shape: tuple[int, int],
        bias: torch.Tensor | None,
    ) -> None:
        torch.nn.Module.__init__(self)  # not Linear's, which would allocate a full weight
        self.out_features, self.in_features = shape
        self.weight_format = weight_format
        frozen_bias = None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", frozen_bias)
        # Not register_buffer, which refuses NF4's "weight" because the class has a property of that name.
        self._buffers.update(packed)
        self.row_scales = [(slice(None), weight_format.output_scale(packed))]

    @classmethod
    def replacing(
        cls, linear: torch.nn.Linear, weight_format: BlockFormat, packed: dict[str, torch.Tensor]
    ) -> PackedLinear:
        """The layer that stores the weight of `linear` as `packed`."""
        layer = cls(weight_format, packed, (linear.out_features, linear.in_features), linear.bias)
        return layer.train(linear.training)

    @property
    def output_scale(self) -> float:
        """The tensor scale of a layer that has only one."""
        ((_, scale),) = self.row_scales
        return scale

    @property
    def weight(self) -> PackedWeight:
        return PackedWeight(self)

    def packed(self) -> dict[str, torch.Tensor]:
        """The packed tensors by their checkpoint names, restored from the kernels' layout if that is resident."""
        resident, kernel_weight = stored(self), self.kernel_weight
        if self.multiplies_fp8:
            return resident | {"weight_scale": resident["weight_scale"].to(self._fp8_scales)}
        if kernel_weight is None:
            return resident
        return layout.unpack(kernel_weight) | {name: resident[name] for name in resident if name not in KERNEL_BUFFERS}

    @property
    def kernel_weight(self) -> layout.KernelWeight | None:
        """The weight as the fused kernels read it, after `use_kernels`."""
        return resident_kernel_weight(
            self, self.weight_format, (self.out_features, self.in_features), self._scale_offset
        )

    @property
    def uses_bitsandbytes(self) -> bool:
        """Whether bitsandbytes multiplies, instead of the fused kernels or their reference."""
        return self.weight_format.own_matmul

    def use_kernels(self) -> None:
        """Replace the packed tensors by the layout of the fused kernels, without loss: `packed` gives the same bits.

        Raises ValueError if the layout cannot hold them.
        """
        if self._scale_offset is not None:
            return
        if self.weight_format.kernel_layout is None:
            raise ValueError(f"the fused kernels have no layout for {self.weight_format}")
        packed = self.packed()
        repacked = layout.repack(self.weight_format.kernel_layout, packed, (self.out_features, self.in_features))
        replaced = [self._buffers.pop(name) for name in packed if name not in TENSOR_SCALES]
        for name, tensor in zip(KERNEL_BUFFERS, (repacked.words, repacked.scales), strict=True):
            room = next((one for one in replaced if one is not None and one.nbytes == tensor.nbytes), None)
            if self.owns_memory and room is not None:
                tensor = room.flatten().view(torch.uint8).view(tensor.dtype).view(tensor.shape).copy_(tensor)
            self._buffers[name] = tensor
        self._scale_offset = repacked.offset

    def use_fp8(self) -> None:
        """Multiply codes of bfloat16 inputs by those of the weight from now on."""
        if not self.multiplies_fp8:
            self._fp8_scales = (scales := stored(self)["weight_scale"]).dtype
            self._buffers["weight_scale"] = scales.to(torch.float32)

    @property
    def multiplies_fp8(self) -> bool:
        return self._fp8_scales is not None

    def operand(self, dtype: torch.dtype) -> torch.Tensor:
        """The matmul operand (N, K), rebuilt on every call."""
        return self.weight_format.operand(self.packed(), (self.out_features, self.in_features), dtype)

    def keep_operand(self, room: torch.Tensor) -> None:
        """Write the operand to `room` (N, K), which matmuls in its dtype read until `drop_operand`.

        Up to `decode.FEW_TOKENS` tokens the decode kernel goes on reading the packed weight.
        """
        if (kernel_weight := self.kernel_weight) is not None and room.device.type == "cuda":
            dequantize(kernel_weight, room)
        else:
            room.copy_(self.operand(room.dtype))
        self._kept = {room.dtype: room}

    def drop_operand(self) -> None:
        self._kept = None

    def matmul_operand(self, dtype: torch.dtype) -> torch.Tensor:
        """`operand` for immediate use: with kernels, in a buffer that the next call overwrites."""
        if self._kept is not None:
            if dtype not in self._kept:
                self._kept[dtype] = self.operand(dtype)
            return self._kept[dtype]
        if self.multiplies_fp8:
            return fp8.dequantize(*self._fp8_weight(), dtype)
        if (kernel_weight := self.kernel_weight) is None or dtype != torch.bfloat16:
            return self.operand(dtype)
        return dequantize(kernel_weight)

    def dequantized(self) -> torch.Tensor:
        """The weight (N, K) that this layer multiplies by, in FP32."""
        weight = self.operand(torch.float32)
        for rows, scale in self.row_scales:
            weight[rows].mul_(scale)
        return weight

    def forward(self, input: torch.Tensor, adapter: Adapter | JoinedAdapters | None = None) -> torch.Tensor:
        """x (..., K) to (..., N), plus the output of `adapter`; the decode kernel takes a single one."""
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        if self.rounding is None or not self.rounding.on:
            return self._multiply(input, adapter)
        single = isinstance(adapter, Adapter) and not torch.is_grad_enabled()
        if self.multiplies_fp8 and input.dtype == torch.bfloat16:
            own = self.bias, None if single else adapter, self._multiply_fp8, self._gradient()
            y = packed_linear(input, self.matmul_operand, self.row_scales, *own)
        else:
            assert single or not adapter  # training applies it by PEFT
            y = self._multiply(self.rounding(input), None)
        return plus_adapter(y, input, adapter) if isinstance(adapter, Adapter) and single else y

    def _multiply_fp8(self, rows: torch.Tensor) -> torch.Tensor:
        """rows (M, K) in bfloat16, rounded to E4M3, to (M, N)."""
        codes, scales = self.rounding.codes(rows)
        return fp8.multiply(codes, scales, *self._fp8_weight(), self.bias)

    def _fp8_weight(self) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = map(stored(self).__getitem__, FP8_BUFFERS)
        return codes, scales

    def _multiply(self, input: torch.Tensor, adapter: Adapter | JoinedAdapters | None) -> torch.Tensor:
        if self.uses_bitsandbytes:
            assert adapter is None  # PEFT applies it
            shape = (self.out_features, self.in_features)
            return self.weight_format.multiply(input, self.packed(), shape, self.bias)
        kernel_weight = self.kernel_weight
        if kernel_weight is not None and not torch.is_grad_enabled():
            tokens = input.reshape(-1, self.in_features).contiguous()
            few = decode.pays(kernel_weight, len(tokens), input.dtype, at_hand=self._kept is not None)
            if few and (adapter is None or isinstance(adapter, Adapter)):
                return self._decode_gemm(kernel_weight, tokens, adapter).view(*input.shape[:-1], self.out_features)
        return packed_linear(input, self.matmul_operand, self.row_scales, self.bias, adapter, None, self._gradient())

    def _gradient(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What takes the place of dY W."""
        rounding = self.rounding
        return partial(rounding.input_gradient, self) if rounding and rounding.on and rounding.gradients else None

    def _decode_gemm(self, weight: layout.KernelWeight, x: torch.Tensor, adapter: Adapter | None) -> torch.Tensor:
        """x (M, K) of a few tokens to (M, N), straight from the packed weight."""
        if len(self.row_scales) == 1:
            scale: float | torch.Tensor = self.output_scale
        else:
            scale = torch.empty(self.out_features, device=x.device)
            for rows, value in self.row_scales:
                scale[rows] = value
        if adapter is None:
            return decode.decode_gemm(x, weight, scale, self.bias)
        a, b, parts = adapter.a.to(x.dtype), adapter.b.to(x.dtype), adapter.parts  # (r, K) and (N, r)
        if b.shape[1] > decode.MAX_RANK * (len(parts) or 1):
            return decode.decode_gemm(x, weight, scale, self.bias).addmm_(down(x, a), b.t(), alpha=adapter.scaling)
        beside = projection.runs_beside(x, a)  # then `decode_gemm` has to be the next call
        lora = down(x, a, beside), b, adapter.scaling
        return decode.decode_gemm(x, weight, scale, self.bias, lora, parts=parts, beside=beside)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.weight_format.name}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedLinear:
        with keep_packed_dtypes(self):
            super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if not is_sharded(self):  # then only what is trained is read
            self.row_scales = [(slice(None), self.weight_format.output_scale(self.packed()))]


@contextmanager
def keep_packed_dtypes(module: torch.nn.Module) -> Iterator[None]:
    """Let `model.to(...)`, `.half()` and the like move the packed tensors of a module, but never convert them."""
    before = dict(module._buffers)
    yield
    for name, tensor in module._buffers.items():
        old = before[name]
        if tensor is not None and old is not None and tensor.dtype != old.dtype:
            module._buffers[name] = old.to(tensor.device)


def pack_linear(
    name: str, linear: torch.nn.Linear, weight_format: WeightFormat, tensor_amax: float | None = None
) -> torch.nn.Linear:
    """The layer `name` rounded to nearest and packed; the layer itself for a format that packs nothing.

    `tensor_amax` is that of `BlockFormat.scales`. Raises ConfigError, naming the layer, if its width does not fit the
    format or a weight is not finite.
    """
    if not isinstance(weight_format, BlockFormat):
        return linear
    weight_format.check_width(name, linear.in_features)
    with naming(name):
        packed = weight_format.pack(linear.weight.detach(), tensor_amax)
    return PackedLinear.replacing(linear, weight_format, packed)


def resident_bytes(layer: torch.nn.Module) -> int:
    """Bytes of the layer's weight, scales included, without the bias."""
    if isinstance(layer, torch.nn.Linear) and not isinstance(layer, PackedLinear):
        return layer.weight.nbytes
    return sum(tensor.nbytes for tensor in layer.buffers())
