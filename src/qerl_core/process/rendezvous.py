"""Where the processes that torchrun has started, on one machine or several, first find each other."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from qerl_core.checks import TrainingStopped

LIMIT_S = 300.0  # for all to arrive with what they need imported


def arrived() -> tuple[Any, int, int]:
    """The store of torchrun, the rank of this process and their number, once all have arrived there.

    Raises TrainingStopped if the store is out of reach for `LIMIT_S`, or lacks some of them then.
    """
    from torch.distributed.rendezvous import rendezvous

    limit, place = timedelta(seconds=LIMIT_S), f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    lacking: list[int] = []
    try:
        store, rank, size = next(rendezvous("env://", timeout=limit))
        keys = [f"arrived/{one}" for one in range(size)]
        store.set(keys[rank], "")
        try:
            store.wait(keys, limit)
        except RuntimeError:
            lacking = [one for one in range(size) if not store.check([keys[one]])]
            if not lacking:
                raise
    except (RuntimeError, ConnectionError) as error:
        raise TrainingStopped(
            f"process {os.environ['RANK']} does not reach process 0 at {place} within {LIMIT_S:g} s, or no longer: see "
            "what torchrun printed there, or give an address that all machines reach, --rdzv-endpoint HOST:PORT"
        ) from error
    if lacking:
        raise TrainingStopped(
            f"of {size} processes {', '.join(map(str, lacking))} did not arrive at {place} within {LIMIT_S:g} s, and "
            "what torchrun printed there says why. Start all again: a run continues from its last checkpoint"
        )
    return store, rank, size
