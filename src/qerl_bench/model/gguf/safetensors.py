"""A file of safetensors that is filled in pieces, in any order: byte for byte what safetensors.torch.save_file writes.

That one wants all tensors in memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # of torch, and of the format
ALIGNMENT = 8  # bytes, of the first tensor
SERIAL = 2**14  # numbers that torch rounds in the thread that asks; for more it starts threads of its own in each


def lay_out(file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> dict[str, int]:
    """Write the header, and room for tensors of these names. Returns the byte where each begins."""
    import torch

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(shapes):
        begin, end = end, end + math.prod(shapes[name]) * getattr(torch, dtype).itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": shapes[name], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with open(file, "wb") as writing:
        writing.write(len(text).to_bytes(8, "little") + text)
        first = writing.tell()
        writing.truncate(first + end)
    return {name: first + header[name]["data_offsets"][0] for name in shapes}


def rounded(values: np.ndarray, dtype: Any) -> memoryview:
    """The bytes of FP32 `values` in a dtype of torch."""
    import torch

    numbers = torch.from_numpy(values).flatten()
    kept = torch.empty_like(numbers, dtype=dtype)
    for target, source in zip(kept.split(SERIAL), numbers.split(SERIAL), strict=True):
        target.copy_(source)
    return kept.view(torch.uint8).numpy().data


def write_at(file: Path, start: int, content: memoryview) -> None:
    """Write bytes at `start`; threads may do so at the same time."""
    with open(file, "r+b", buffering=0) as writing:
        while content:
            written = os.pwrite(writing.fileno(), content, start)
            content, start = content[written:], start + written
