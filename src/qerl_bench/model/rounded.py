"""What a policy rounds besides its weights: how it goes without, and what was lost since that was last asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from qerl_bench.quant.base import NOT_ROUNDED
from qerl_core.metrics.compute import ratio

if TYPE_CHECKING:
    from qerl_bench.model.policy import Policy

Counts = Mapping[str, tuple[int, int]]  # of each metric: a part, and the whole


@contextmanager
def unrounded(policy: Policy) -> Iterator[None]:
    """Context in which inputs of packed layers, keys and values stay as they are, for comparisons to the last bit."""
    with nullcontext() if policy.rounding is None else policy.rounding.off(), policy.kv.off():
        yield


def take_counts(policy: Policy, sampling: bool = False) -> Counts:
    """What was counted since the last call, of what rounds in passes of training, or while `sampling`."""
    counts: dict[str, tuple[int, int]] = {}
    if policy.rounding is not None:
        counts["activations/underflow"] = policy.rounding.take()
        if policy.rounding.gradients and not sampling:
            counts["gradients/underflow"] = policy.rounding.take_gradients()
    kinds, kv = policy.kv.kinds, policy.kv.take()
    if (kinds.rollout if sampling else kinds.train) != NOT_ROUNDED:
        counts |= kv
    return counts


def shares(of_ranks: Iterable[Counts], suffix: str = "") -> dict[str, float]:
    """The metrics of counts that several ranks took."""
    ranks = list(of_ranks)
    return {name + suffix: ratio([counts[name] for counts in ranks]) for name in ranks[0]}
