"""One buffer for all that lives no longer than one matmul: a weight in 16 bits, the logits of a few tokens.

Its owner may use it until the next request on the same stream; nothing that autograd saves may lie in it. It grows to
the largest request and stays, so training does not ask the allocator for hundreds of megabytes again and again.
"""

from __future__ import annotations

import math

import torch

_buffers: dict[tuple[torch.device, int], torch.Tensor] = {}


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor whose contents are undefined and which the next call gives away again."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    size = math.prod(shape) * dtype.itemsize
    buffer = _buffers.get((device, stream))
    if buffer is None or buffer.numel() < size:
        _buffers.pop((device, stream), None)
        del buffer
        with torch.inference_mode(False):  # or training could not write to what sampling has made
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
        _buffers[device, stream] = buffer
    return buffer[:size].view(dtype).view(shape)
