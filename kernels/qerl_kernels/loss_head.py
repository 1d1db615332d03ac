"""Log-probability and entropy of given tokens under a frozen linear head, with gradients, in chunks of tokens.

cuBLAS writes the logits of a chunk into a shared buffer, and one kernel reads them once. Both scores of a token are
scalars, so their gradients with respect to the hidden state are known before the backward pass, up to a factor. If they
are needed, a second kernel overwrites the logits with their gradient, and a second matmul gives the gradient of the
hidden state. Backward multiplies it by the factor. Nothing is computed twice, and there is no weight gradient. Left
out: heads that are trained or packed; they use the plain head.
"""

from __future__ import annotations

from typing import Any

import torch

from qerl_kernels.checks import require_device, require_shape
from qerl_kernels.scratch import scratch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCORES = (2048, 4)  # block of the vocabulary and warps of the kernel that reads logits
GRADIENTS = (4096, 4)  # the same of the kernel that overwrites them

Scores = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def plain_scores(logits: torch.Tensor, targets: torch.Tensor, temperature: float, entropy_gradient: bool) -> Scores:
    """The reference, from logits (M, V): log-probability and entropy at `temperature`, entropy at temperature 1, all in
    nats, and 1 if greedy decoding would choose the target, else 0; each FP32 (M,)."""
    logits = logits.float()
    scaled = torch.log_softmax(logits / temperature, dim=-1)
    logprobs = scaled.gather(-1, targets[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = entropy_of(scaled)
    with torch.no_grad():
        entropy_t1 = entropy.detach() if temperature == 1.0 else entropy_of(torch.log_softmax(logits, dim=-1))
        likeliest = (logits.argmax(-1) == targets).float()
    return logprobs, entropy, entropy_t1, likeliest


def entropy_of(logprobs: torch.Tensor) -> torch.Tensor:
    """Shannon entropy in nats over the last dimension of normalized `logprobs` (..., V); tokens at -inf count 0."""
    return -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(-1)


def linear_scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    entropy_gradient: bool = False,
    max_logits: int = 2**27,
) -> Scores:
    """`plain_scores` of the logits `hidden` (M, H) x `weight`^T (V, H) + `bias` (V,), at most `max_logits` at a time.

    Differentiable in `hidden` only: through the log-probability and, with `entropy_gradient`, the entropy. Logits are
    rounded to the dtype of `hidden`, as in sampling. Raises ValueError if the tensors do not fit together or the head
    needs gradients.
    """
    vocabulary, width = weight.shape
    require_shape("weight", weight, (-1, -1), *DTYPES)
    require_shape("hidden", hidden, (-1, width), weight.dtype)
    require_shape("targets", targets, (len(hidden),), torch.int64)
    if bias is not None:
        require_shape("bias", bias, (vocabulary,), weight.dtype)
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        raise ValueError("the head must be frozen, since it gets no gradient; use plain_scores to train it")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    require_device(hidden=hidden, weight=weight, targets=targets, bias=weight if bias is None else bias)
    rows = max(1, max_logits // vocabulary)
    rows = rows if rows < 128 else rows // 128 * 128  # whole tiles for the matmul
    wanted = hidden.requires_grad and torch.is_grad_enabled()
    return _LinearScores.apply(hidden, weight, bias, targets, temperature, wanted, wanted and entropy_gradient, rows)


class _LinearScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        gradient: bool,
        entropy_gradient: bool,
        rows: int,
    ) -> Scores:
        from qerl_kernels import jit_loss_head

        row_scores: Any = jit_loss_head.row_scores
        gradients: Any = jit_loss_head.gradients

        vocabulary = len(weight)
        logprob, entropy, entropy_t1, likeliest, logsumexp = hidden.new_empty(5, len(hidden), dtype=torch.float32)
        toward_logprob = torch.empty_like(hidden) if gradient else None  # d log-probability / d hidden, (M, H)
        toward_entropy = torch.empty_like(hidden) if entropy_gradient else None
        rows = max(1, min(rows, len(hidden)))
        buffers = scratch((1 + entropy_gradient, rows, vocabulary), hidden.dtype, hidden.device)
        for start in range(0, len(hidden), rows):
            part = slice(start, min(start + rows, len(hidden)))
            logits = buffers[0, : part.stop - start]
            if bias is None:
                torch.mm(hidden[part], weight.t(), out=logits)
            else:
                torch.addmm(bias, hidden[part], weight.t(), out=logits)
            row_scores[(len(logits),)](
                logits,
                targets[part],
                logprob[part],
                entropy[part],
                entropy_t1[part],
                likeliest[part],
                logsumexp[part],
                vocabulary,
                logits.stride(0),
                1.0 / temperature,
                SCALED=temperature != 1.0,
                BLOCK=SCORES[0],
                num_warps=SCORES[1],
                enable_fp_fusion=True,
            )
            if toward_logprob is None:
                continue
            slopes = buffers[-1, : len(logits)]
            gradients[(len(logits), -(-vocabulary // GRADIENTS[0]))](
                logits,
                slopes,
                targets[part],
                logsumexp[part],
                entropy[part],
                vocabulary,
                logits.stride(0),
                1.0 / temperature,
                WITH_ENTROPY=entropy_gradient,
                BLOCK=GRADIENTS[0],
                num_warps=GRADIENTS[1],
                enable_fp_fusion=True,
            )
            torch.mm(logits, weight, out=toward_logprob[part])
            if toward_entropy is not None:
                torch.mm(slopes, weight, out=toward_entropy[part])
        ctx.save_for_backward(toward_logprob, toward_entropy)
        constant = (entropy_t1, likeliest) if entropy_gradient else (entropy, entropy_t1, likeliest)
        ctx.mark_non_differentiable(*constant)
        return logprob, entropy, entropy_t1, likeliest

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        toward_logprob, toward_entropy = ctx.saved_tensors
        grad = grads[0][:, None] * toward_logprob.float()
        if toward_entropy is not None:
            grad += grads[1][:, None] * toward_entropy.float()
        return grad.to(toward_logprob.dtype), *(None,) * 7
