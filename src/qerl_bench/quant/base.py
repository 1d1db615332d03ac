"""Base classes of weight formats: how one matrix is packed, and how its matmul operand is rebuilt.

A format is a frozen dataclass named by `_target_` in conf/quant/*.yaml. Formats import torch only inside their methods,
so that composing a config needs no torch. The bit-level code is in `qerl_kernels`, next to the fast kernels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from qerl_core.checks import ConfigError, check_fields, flag, number, one_of, require

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from qerl_bench.quant.foreign import Foreign, Part

NOT_ROUNDED = "none"
ACTIVATIONS = {NOT_ROUNDED: 1, "nvfp4": 16, "mxfp4": 32, "fp8": 1, "int8": 1}  # inputs that must divide a width
KEYS_AND_VALUES = (NOT_ROUNDED, "fp8", "int8", "nvfp4")  # what rollout.kv and its like may be, keys of ACTIVATIONS


class WeightFormat:
    """How the frozen linear weights of a model are stored. The defaults are those of a format that packs nothing."""

    name: str
    bits_per_weight: float | None = None  # resident, scales included; None if the layers stay as they are
    kernel_layout: str | None = None  # name of the format in `qerl_kernels.layout`; None without fused kernels
    activations: str  # what the inputs of packed layers are rounded to: one of ACTIVATIONS

    def unsupported_reason(self, device: str) -> str | None:
        """Why this format cannot run on `device` ("cpu" or "cuda") on this machine, or None if it can."""
        return None

    def check_width(self, name: str, in_features: int) -> None:
        """Raise ConfigError if blocks do not divide the input width of the layer `name`."""

    def foreign(self) -> Foreign | None:
        """What checkpoints of other programs call this format; None if they have no name for it."""
        return None


@dataclass(frozen=True, kw_only=True)
class BlockFormat(WeightFormat, ABC):
    """A format that packs W (N, K): a low-bit code per weight, and a scale per block of neighboring inputs."""

    name: str
    activations: str
    partial: bool  # whether a run may leave more than 5 % of the blocks' weights unpacked
    keep_first: float  # share of the transformer blocks, from the first one on, that stay in 16 bits
    keep_last: float  # the same from the last one back

    block: ClassVar[Any]  # inputs that share a scale
    block_rows = 1  # rows that do
    tensor_scale = False  # whether a matrix has a scale as a whole, one for all layers that engines run as one matrix
    own_matmul = False  # whether `multiply` takes the place of a matmul by `operand`

    def __post_init__(self) -> None:
        check_fields(
            self,
            "quant",
            activations=one_of(*ACTIVATIONS),
            partial=flag,
            keep_first=number(0, below=1),
            keep_last=number(0, below=1),
        )
        require(
            self.keep_first + self.keep_last < 1,
            f"quant.keep_first={self.keep_first} and quant.keep_last={self.keep_last} keep every transformer block in "
            "16 bits, so that nothing is packed. Make one of them smaller, or use quant=bf16",
        )

    @property
    def weights_alone(self) -> bool:
        """Whether weights are rounded in all blocks, and nothing else."""
        return (self.activations, self.keep_first, self.keep_last) == (NOT_ROUNDED, 0, 0)

    def kept(self, blocks: int) -> set[int]:
        """The numbers of the transformer blocks that stay in 16 bits, of `blocks`: shares, rounded to whole blocks.

        Raises ConfigError if no block is left.
        """
        first, last = (math.floor(share * blocks + 0.5) for share in (self.keep_first, self.keep_last))
        require(
            first + last < blocks or blocks == 0,
            f"quant.keep_first={self.keep_first} and quant.keep_last={self.keep_last} keep {first} and {last} of "
            f"{blocks} transformer blocks in 16 bits, so that nothing is packed. Make one of them smaller, or use "
            "quant=bf16",
        )
        return {*range(first), *range(blocks - last, blocks)}

    def block_of(self, in_features: int) -> int:
        """How many inputs of a row of `in_features` share a scale: `block`, unless a format has it otherwise."""
        return self.block

    def check_width(self, name: str, in_features: int) -> None:
        block = self.block_of(in_features)
        require(
            in_features % block == 0,
            f"{name}: {type(self).__name__} quantizes blocks of {block} inputs, which do not divide this layer's "
            f"input width {in_features}; choose a model whose widths are multiples of {block}, or quant=bf16",
        )
        inputs = ACTIVATIONS[self.activations]
        require(
            in_features % inputs == 0,
            f"{name}: activations={self.activations} rounds blocks of {inputs} inputs, which do not divide this "
            f"layer's input width {in_features}; use activations=fp8 or int8, with a scale for each token, or none",
        )

    def require_finite(self, weight: torch.Tensor) -> None:
        """Raise ConfigError if a weight is NaN or infinite, which no code can express.

        A recording of GPU kernels cannot look at what they give: whoever records looks afterwards.
        """
        import torch

        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        low, high = weight.aminmax()  # several times faster than isfinite; NaN if any weight is NaN
        if math.isfinite(float(low)) and math.isfinite(float(high)):
            return
        count = weight.numel() - int(weight.isfinite().sum())
        raise ConfigError(
            f"{count} of {weight.numel()} weights are NaN or infinite as {weight.dtype}, which {type(self).__name__} "
            "cannot store; repair the checkpoint, or choose a dtype of wider range if they overflowed"
        )

    @abstractmethod
    def scales(
        self, weight: torch.Tensor, tensor_amax: float | None = None, stretch: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """The scale tensors of W (N, K) by the format's rule: from the maximum of each block, times `stretch`.

        `tensor_amax` is the largest |w| of all matrices that share a tensor scale with W, None if W has its own.
        Formats without a tensor scale ignore it. Raises ConfigError if W holds NaN or infinity.
        """

    @abstractmethod
    def unit(self, scales: dict[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
        """The weight that a grid value of 1 means under `scales`, FP32 (N, K/block): weight = unit x grid value."""

    @abstractmethod
    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        """The grid value nearest to each FP32 value, rounded and saturated as the format does it."""

    @abstractmethod
    def encode(self, weight: torch.Tensor, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """W (N, K) rounded under `scales`: the resident tensors, under the names of the format's checkpoints."""

    def pack(self, weight: torch.Tensor, tensor_amax: float | None = None) -> dict[str, torch.Tensor]:
        """W (N, K) rounded to nearest under the scales of its block maxima."""
        return self.encode(weight, self.scales(weight, tensor_amax))

    @abstractmethod
    def operand(self, packed: dict[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """The matmul operand (N, K) in `dtype`: W divided by `output_scale`."""

    def output_scale(self, packed: dict[str, torch.Tensor]) -> float:
        """The tensor scale, which multiplies the output of the matmul in FP32; 1.0 for formats without one."""
        return 1.0

    def multiply(
        self, x: torch.Tensor, packed: dict[str, torch.Tensor], shape: tuple[int, int], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x (..., K) to (..., N), differentiable in x, for formats with `own_matmul`."""
        raise NotImplementedError

    # --- checkpoints of other programs, for formats with a name there ---

    def stored(self, packed: dict[str, torch.Tensor], shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        """The tensors of a layer of `shape` (N, K) as a checkpoint of `foreign` holds them, by their names there."""
        return packed

    def check_stored(self, where: str, said: list[dict[str, Any]]) -> None:
        """Raise ConfigError unless what the checkpoint `where` says of its weights fits the options of this format."""

    def parts(self, shape: tuple[int, int], in_words: bool) -> Mapping[str, Part]:
        """What the tensors of a layer of `shape` (N, K) must be in a file, 8-bit codes perhaps four in a word."""
        raise NotImplementedError

    def restored(self, layer: str, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The packed tensors, from those of `parts`. Raises ConfigError, naming `layer`, for values that cannot be."""
        return stored
