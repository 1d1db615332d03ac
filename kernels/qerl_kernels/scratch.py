"""One buffer for tensors that live no longer than one matmul: a weight in 16 bits, the logits of a chunk of tokens.

The caller may use it until the next request on the same stream; autograd must not save it. It grows to the largest
request and is kept, so training does not allocate hundreds of megabytes again and again.
"""

from __future__ import annotations

import math

import torch

_buffers: dict[tuple[torch.device, int], torch.Tensor] = {}


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor with undefined contents, valid until the next call."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    size = math.prod(shape) * dtype.itemsize
    buffer = _buffers.get((device, stream))
    if buffer is None or buffer.numel() < size:
        _buffers.pop((device, stream), None)
        del buffer
        with torch.inference_mode(False):  # so that training can write to a buffer that sampling has allocated
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
        _buffers[device, stream] = buffer
    return buffer[:size].view(dtype).view(shape)
