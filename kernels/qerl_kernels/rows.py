"""What a decoding step knows about each row of its batch, and how a row moves on when its next token is drawn.

The state is one tensor (len(FIELDS), R) int64 on the device, so that the host reads and writes all of it at once, and a
captured CUDA graph finds it at the same place. A row that is done stands still: it computes on, but its results go to
the last column of the results, which nobody reads.
"""

from __future__ import annotations

from typing import Any

import torch

from qerl_kernels.checks import require_device, require_shape
from qerl_kernels.overlap import overlapping
from qerl_kernels.row_fields import DONE, DRAWN, FIELDS, LENGTH, LIMIT, PLACE, STOPS, TOKEN

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # tokens int64, log-probabilities and entropies FP32


def advance(state: torch.Tensor, drawn: Results, stop_ids: torch.Tensor, results: Results) -> None:
    """Give each of the first n rows of `state` (len(FIELDS), R) its next token, in one kernel.

    `drawn` are n tokens with log-probability and entropy, each (n,). Token number k of a row goes to column k of its
    place in `results`, each (places, T + 1). `stop_ids` is (K,) int64.
    """
    rows, width = len(drawn[0]), results[0].shape[1]
    require_shape("state", state, (len(FIELDS), -1), torch.int64)
    require_shape("stop_ids", stop_ids, (-1,), torch.int64)
    for name, tensor, found, dtype in zip(
        ("token", "logprob", "entropy"), drawn, results, (torch.int64, torch.float32, torch.float32), strict=True
    ):
        require_shape(name, tensor, (rows,), dtype)
        require_shape(f"results of {name}", found, (-1, width), dtype)
    require_device(state=state, token=drawn[0], stop_ids=stop_ids, results=results[0])
    from qerl_kernels import jit_rows

    kernel: Any = jit_rows.advance
    kernel[(rows,)](
        state, *drawn, stop_ids, *results, state.shape[1], len(stop_ids), width,
        STOPS_BLOCK=1 << max(0, len(stop_ids) - 1).bit_length(), num_warps=1, **overlapping(state.device),
    )  # fmt: skip


def advance_reference(state: torch.Tensor, drawn: Results, stop_ids: torch.Tensor, results: Results) -> None:
    """`advance` in plain PyTorch on any device."""
    rows = state[:, : len(drawn[0])]
    token, last = drawn[0], results[0].shape[1] - 1
    done = rows[DONE] > 0
    column = torch.where(done, last, rows[DRAWN])
    for result, one in zip(results, drawn, strict=True):
        result[rows[PLACE], column] = one
    going = (~done).long()
    rows[TOKEN] = torch.where(done, rows[TOKEN], token)
    rows[LENGTH] += going
    rows[DRAWN] += going
    rows[DONE] = (done | (rows[DRAWN] >= rows[LIMIT]) | ((rows[STOPS] > 0) & torch.isin(token, stop_ids))).long()
