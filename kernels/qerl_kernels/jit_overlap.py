"""The first line of each kernel that may start before earlier ones have ended; `overlap` has the rule."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):
    if PDL:  # targets before sm_90 have neither instruction
        gdc_launch_dependents()
        gdc_wait()
