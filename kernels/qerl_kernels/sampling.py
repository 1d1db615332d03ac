"""Drawing the next token by inverse CDF: temperature, top-k, top-p, its log-probability, and the entropy.

The random number of a token comes from Philox, a counter-based generator, with the key of the request and the position
of the token. NumPy makes the same numbers on the host as the kernel on the GPU. So a completion does not depend on the
rest of its batch. Left out: penalties, beam search.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qerl_kernels.checks import require_device, require_shape
from qerl_kernels.loss_head import entropy_of
from qerl_kernels.overlap import overlapping

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK, WARPS = 4096, 16
Drawn = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def uniforms(keys: Sequence[int], count: int) -> np.ndarray:
    """The numbers in [0, 1) of positions 0..count-1 for each 63-bit key, (len(keys), count) float64."""
    return np.stack([np.random.Generator(np.random.Philox(key=key)).random(count) for key in keys])


def draw(logits: torch.Tensor, temperature: float, uniform: torch.Tensor, top_p: float = 1.0, top_k: int = 0) -> Drawn:
    """The reference: a token for each row of `logits` (B, V), its log-probability, and the row's entropy, in nats.

    The token is the first whose cumulative probability exceeds `uniform` (B,) among the allowed ones: the `top_k`
    likeliest (0: all), and of these the likeliest that together hold `top_p` of their probability. Ties with the last
    of them are kept. Log-probability and entropy are over the whole vocabulary at `temperature`, as a trainer computes
    them. Temperature 0 takes the likeliest token and reports both at temperature 1. In a row with a logit that is NaN
    or plus infinity both are NaN, and the token is arbitrary.
    """
    scaled = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        token = scaled.argmax(-1)
    else:
        probability = scaled.double().exp()
        if top_k > 0:
            least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
            probability = probability.where(logits >= least, 0)
            probability = probability / probability.sum(-1, keepdim=True)
        if top_p < 1:
            probability = nucleus(probability, top_p)
        cumulative = probability.cumsum(-1)
        token = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
        token = token.clamp(max=logits.shape[-1] - 1)
    return token, scaled.gather(-1, token[:, None])[:, 0], entropy_of(scaled)


def nucleus(probability: torch.Tensor, top_p: float) -> torch.Tensor:
    """`probability` (B, V), set to 0 outside the smallest set of likeliest tokens that holds `top_p` of it.

    The token that crosses `top_p` belongs to the set, and so do all tokens of the same probability.
    """
    ordered = probability.sort(dim=-1, descending=True).values
    before = ordered.cumsum(-1) - ordered  # (B, V) mass of the likelier tokens
    least = ordered.where(before < top_p, 1).amin(-1, keepdim=True)  # (B, 1)
    return probability.where(probability >= least, 0)


def draw_seeded(
    logits: torch.Tensor,
    temperature: float,
    keys: torch.Tensor,
    position: int | torch.Tensor,
    top_p: float = 1.0,
    top_k: int = 0,
) -> Drawn:
    """`draw` in one kernel, with number `position` of `uniforms` for each of the requests' `keys` (B,) int64.

    If `position` is a tensor (B,) int64, one for each row, the kernel reads it when it runs, so one CUDA graph serves
    all positions.
    Rows of `logits` (B, V) may be strided. Deterministic. Tokens differ from the reference only if a random number is
    within rounding (1e-6) of the border between two tokens.
    """
    if logits.ndim != 2 or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be (B, V) with contiguous rows, got shape {tuple(logits.shape)} and strides "
            f"{logits.stride()}; pass logits.contiguous()"
        )
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"logits must be of bfloat16, float16 or float32, got {logits.dtype}; convert them")
    require_shape("keys", keys, (len(logits),), torch.int64)
    if not temperature >= 0 or top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(
            "temperature and top_k must be at least 0 and top_p in (0, 1], got "
            f"temperature={temperature}, top_k={top_k}, top_p={top_p}"
        )
    on_device = isinstance(position, torch.Tensor)
    if on_device:
        require_shape("position", position, (len(logits),), torch.int64)
    require_device(logits=logits, keys=keys, position=position if on_device else keys)
    from qerl_kernels import jit_sampling

    count, vocabulary = logits.shape
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    logprobs, entropies = (torch.empty(count, dtype=torch.float32, device=logits.device) for _ in range(2))
    blocks = -(-vocabulary // BLOCK)
    kernel: Any = jit_sampling.draw
    kernel[(count,)](
        logits,
        keys,
        tokens,
        logprobs,
        entropies,
        position,
        vocabulary,
        logits.stride(0),
        1.0 / (temperature or 1.0),
        top_k,
        top_p,
        GREEDY=temperature == 0,
        TOP_K=0 < top_k < vocabulary,
        TOP_P=top_p < 1,
        SHIFT=16 if logits.dtype == torch.bfloat16 else 0,
        BLOCK=BLOCK,
        BLOCKS=1 << (blocks - 1).bit_length(),
        ON_DEVICE=on_device,
        num_warps=WARPS,
        enable_fp_fusion=True,
        **overlapping(logits.device),
    )
    return tokens, logprobs, entropies
