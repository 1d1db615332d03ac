"""The first line of each kernel that may start before earlier ones have ended; `overlap` has the rule."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qerl_kernels import ahead

BRING, OPERANDS = tl.constexpr(ahead.BRING), tl.constexpr(ahead.BRING_OPERANDS)


@triton.jit
def wait_for_earlier(PDL: tl.constexpr, LATE: tl.constexpr = False):
    """If LATE, the next kernel starts no earlier than this one goes on: all before this one have ended then."""
    if PDL:  # targets before sm_90 have neither instruction
        if not LATE:
            gdc_launch_dependents()
        gdc_wait()
        if LATE:
            gdc_launch_dependents()


@triton.jit
def bring_share(pointer, program, programs, total):
    """One of `programs` asks for its share of `total` bytes in the L2 cache: a hint (`ahead`)."""
    each = tl.cdiv(total, programs * 128) * 128
    first = program * each
    address = (pointer.to(tl.int64) & -16) + first
    size = tl.minimum(each, total - first) // 16 * 16
    tl.inline_asm_elementwise(BRING, OPERANDS, [address, size], dtype=tl.int32, is_pure=False, pack=1)
