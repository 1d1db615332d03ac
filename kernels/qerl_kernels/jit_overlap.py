"""The first line of each kernel that may start before earlier ones have ended; `overlap` has the rule."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_earlier(PDL: tl.constexpr, LATE: tl.constexpr = False):
    """If LATE, the next kernel starts only when all kernels before this one have ended."""
    if PDL:  # targets before sm_90 have neither instruction
        if not LATE:
            gdc_launch_dependents()
        gdc_wait()
        if LATE:
            gdc_launch_dependents()
