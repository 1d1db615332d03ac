"""Triton kernel of `rows`: one program per row."""

import triton
import triton.language as tl

from qerl_kernels import row_fields as fields
from qerl_kernels.jit_overlap import wait_for_earlier

TOKEN = tl.constexpr(fields.TOKEN)
LENGTH = tl.constexpr(fields.LENGTH)
DRAWN = tl.constexpr(fields.DRAWN)
DONE = tl.constexpr(fields.DONE)
LIMIT = tl.constexpr(fields.LIMIT)
STOPS = tl.constexpr(fields.STOPS)
PLACE = tl.constexpr(fields.PLACE)


@triton.jit
def advance(
    state, tokens, logprobs, entropies, stop_ids, ids, all_logprobs, all_entropies, stride, count, width,
    STOPS_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store what was drawn for one row, and move it on unless it was done."""
    wait_for_earlier(PDL)
    row = tl.program_id(0)
    mine = state + row
    token = tl.load(tokens + row)
    done = tl.load(mine + DONE * stride)
    drawn = tl.load(mine + DRAWN * stride)
    column = tl.where(done > 0, width - 1, drawn)
    at = tl.load(mine + PLACE * stride) * width + column
    tl.store(ids + at, token)
    tl.store(all_logprobs + at, tl.load(logprobs + row))
    tl.store(all_entropies + at, tl.load(entropies + row))
    if done == 0:
        stop = tl.arange(0, STOPS_BLOCK)
        known = tl.load(stop_ids + stop, mask=stop < count, other=-1)
        stopped = (tl.max((known == token).to(tl.int32), 0) > 0) & (tl.load(mine + STOPS * stride) > 0)
        ended = stopped | (drawn + 1 >= tl.load(mine + LIMIT * stride))
        tl.store(mine + TOKEN * stride, token)
        tl.store(mine + LENGTH * stride, tl.load(mine + LENGTH * stride) + 1)
        tl.store(mine + DRAWN * stride, drawn + 1)
        tl.store(mine + DONE * stride, ended.to(tl.int64))
