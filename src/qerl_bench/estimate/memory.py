"""GiB of a run by phase, by counting tensors; and the micro-batches that follow (`train/memory_rule.py`).

What a token keeps for the backward pass is counted in fused blocks: 4 times the width of the MLP and 6.5 times that
of the stream in each, which `kernels/results/h200_training_block.csv` has at 7B. Left out: what PyTorch's allocator
holds beside tensors.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from qerl_bench.estimate.cards import Card
from qerl_bench.estimate.work import Work
from qerl_bench.model.base import SMALL_BYTES
from qerl_bench.train.memory_rule import ADAM_BYTES, GIB, MemoryPlan

SHARE_KEPT = 0.25  # of the share of a card, which sampling may keep


class Memory(NamedTuple):
    """GiB of tensors at most, and what makes them; `fits`: whether the least is there."""

    weights: float
    optimizer: float  # what is trained, its gradients and Adam's moments
    rollout: float  # the peak of sampling
    train: float  # the peak of training
    micro_batch: int  # tokens
    micro_batches: int
    least: float  # training of the longest sequence alone
    fits: bool

    @property
    def peak(self) -> float:
        return max(self.rollout, self.train)


def token_bytes(work: Work) -> float:
    """What one token keeps for the backward pass."""
    sizes, width = work.sizes, work.width
    block = width * (4 * sizes.inner + 6.5 * sizes.hidden)
    kept = {
        "none": block,
        "selective": width * (2 * sizes.inner + 2 * sizes.hidden + sizes.query + 2 * sizes.keys),
        "full": width * sizes.hidden,
    }[work.recompute]
    return kept * sizes.layers + (0 if work.recompute == "none" else block)


def memory(work: Work, card: Card) -> Memory:
    """What a run takes of its share of `card`."""
    share = card.gib * GIB if work.per_card == 1 else card.gib * GIB / work.per_card - GIB
    rows = min(work.completions, work.rows)
    states = work.trained_weights * (4 + 4 + ADAM_BYTES)  # beside frozen 16-bit weights; of lora=none the weights too
    weights = work.weight_bytes if work.rank else 0.0
    wanted = (work.prompts * work.prompt_tokens + rows * work.limit) * work.sizes.key_value_bytes(work.width)
    limit = 0.8 * (share - weights - states) if work.cache_gib is None else work.cache_gib * GIB
    cache = min(wanted, limit)
    most_kept = work.kept_gib * GIB if work.per_card == 1 else min(work.kept_gib * GIB, SHARE_KEPT * share)
    kept = cache if cache <= most_kept else 0.0
    resident, each = weights + states + kept, token_bytes(work)
    longest = work.prompt_tokens + work.limit
    recorded = work.weight_bytes <= SMALL_BYTES and work.recompute == "none"
    peaks = {0: 0, 1024: int(1024 * each)}
    plan = MemoryPlan.of(peaks, int(max(0, share - resident)), 0, int(4 * longest) if recorded else None)
    tokens = work.micro_batch or max(int(longest), plan.micro_batch_tokens)
    return Memory(
        weights / GIB,
        states / GIB,
        (weights + states + cache) / GIB,
        (resident + plan.used(min(tokens, work.trained_tokens))) / GIB,
        tokens,
        math.ceil(work.trained_tokens / tokens),
        (resident + longest * each) / GIB,
        longest * each <= share - resident,
    )
