"""What a weight format is called in the checkpoints of other programs, and how those hold its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

COMPRESSED, MODELOPT, BITSANDBYTES = "compressed-tensors", "modelopt", "bitsandbytes"  # quant_method of config.json
RELEASED, SQUARES = "mxfp4", "fp8"  # the same, of gpt-oss; of DeepSeek and Qwen, whose scales are of squares


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A format by the names of the library `method`."""

    method: str
    names: tuple[str, ...]  # of the format; the first is written, all are read
    scheme: Mapping[str, Any]  # what config.json says of the weights
    leaves: tuple[str, ...] = ()  # names of a layer's tensors, codes first
    codes: str = ""  # dtype in files of codes that are called `weight`
    vllm: bool = False  # whether vLLM multiplies by the packed weights


class Part(NamedTuple):
    """What a tensor of a layer in a file must be; any dtype for None."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
