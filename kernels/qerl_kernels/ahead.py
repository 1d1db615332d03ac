"""The next weight on its way to the L2 cache, while kernels run that leave memory idle.

Between two matmuls of a decoding step come norms, rotation, attention, SwiGLU and x A^T: a few microseconds each, of
which memory is idle most. So a program of the decode GEMM that has read all of its own weight asks for its share of the
first AHEAD_BYTES of the next one. These are hints: they change no number, need not wait for other kernels, and cost
nothing where the next weight is never read. The GEMM marks what it reads as first to leave the cache, so what was
brought stays until it is used. Left out: experts, whose weights are chosen too late.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise

from qerl_kernels.layout import KernelWeight

AHEAD_BYTES = 16 << 20  # of the next weight at most; 0: nothing is brought early. The L2 cache of an H200 has 50 MB.
MOST_ROWS = 64  # of x: with more the tensor cores are busy, and memory is not what a step waits for
_LINE = 128  # bytes of a line of the cache

# PTX: the first thread of a program asks for $2 bytes, a multiple of 16, from $1 on; nobody if that is not positive.
BRING = """{
.reg .pred p;
mov.u32 $0, %tid.x;
setp.eq.u32 p, $0, 0;
setp.gt.and.s32 p, $2, 0, p;
@p cp.async.bulk.prefetch.L2.global [$1], $2;
}"""
BRING_OPERANDS = "=&r,l,r"
BRING_LINE = "prefetch.global.L2 [$1]; // $0"  # each thread the line of its own address
BRING_LINE_OPERANDS = "=r,l"

_next: ContextVar[dict[int, KernelWeight] | None] = ContextVar("next_weights", default=None)


@contextmanager
def reading_in_order(weights: Iterable[KernelWeight | None]) -> Iterator[None]:
    """Inside the context, the decode GEMM of each weight brings a part of the one behind it; None: nothing is known."""
    pairs = [(one, other) for one, other in pairwise(weights) if one is not None and other is not None]
    token = _next.set({one.words.data_ptr(): other for one, other in pairs})
    try:
        yield
    finally:
        _next.reset(token)


def behind(weight: KernelWeight) -> KernelWeight | None:
    """The weight that is multiplied after `weight`, if an order is known."""
    return (_next.get() or {}).get(weight.words.data_ptr())


def shares(weight: KernelWeight | None, programs: int) -> tuple[int, int, int, int]:
    """How many bytes of words, and of scales, all programs bring together, and how many each.

    The totals are multiples of 16, and so is each program's part, in whole lines. Programs past the end bring nothing.
    """
    if weight is None or AHEAD_BYTES <= 0:
        return 0, 0, 0, 0
    part = min(1.0, AHEAD_BYTES / weight.nbytes)
    words, scales = (int(tensor.nbytes * part) // 16 * 16 for tensor in (weight.words, weight.scale_words))
    scales = 0 if weight.scale_words is weight.words else scales
    each_words, each_scales = (-(-total // (programs * _LINE)) * _LINE for total in (words, scales))
    return words, scales, each_words, each_scales
