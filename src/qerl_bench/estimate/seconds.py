"""How long the parts of a run take, by counting: decoding steps, bytes that they read, operations; and rates.

A decoding step of `b` rows costs what it costs with one row, launches and the reading of all weights, and for each row
its operations and its keys and values. So a rollout takes its number of steps times the first, and its tokens times the
second. Training takes operations, and launches for each micro-batch. Left out: noise, which costs next to nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qerl_bench.estimate.cards import Card
from qerl_bench.estimate.work import Work


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What was fitted on committed runs (`benchmarks/estimate.py`); shares are of what the card's data sheet says."""

    decode_layer_s: float  # launches of a layer in a decoding step
    decode_bandwidth: float  # share
    decode_flops: float  # share, of weights in 16 bits
    decode_flops_packed: float
    rollout_s: float  # beside all steps
    train_layer_s: float  # of a layer in a micro-batch
    train_flops: float  # share
    selective: float  # times the operations of blocks
    whole: float  # times the operations of blocks, where every weight is trained
    modules: float  # times the training time, with modules of transformers
    other: float  # seconds of a step for each completion: grading, records
    start_s: float  # of a run beside steps and evaluations: imports, loading, comparisons, figures
    save_s: float  # for each byte of a checkpoint
    share: float  # of its own time that each further run on a card adds to sampling
    train_share: float  # the same of training


def sampling_s(work: Work, completions: float, prompts: float, limit: float, card: Card, rates: Rates) -> float:
    """Seconds to sample so many completions of up to `limit` tokens to so many prompts, alone on the card."""
    if completions == 0:
        return 0.0
    sizes, tokens = work.sizes, min(work.tokens, limit)
    longest = limit if tokens > 0.98 * limit else min(limit, tokens * (math.log(completions) + 0.58))  # geometric
    steps = max(longest, completions * tokens / work.rows)
    packed = work.bits < 8 * work.width
    flops = (rates.decode_flops_packed if packed else rates.decode_flops) * card.flops
    bandwidth = rates.decode_bandwidth * card.bandwidth
    read = work.weight_bytes if sizes.tied else work.weight_bytes - sizes.head_weights * work.width
    context = work.prompt_tokens + tokens / 2
    each = 2 * (sizes.block_weights + sizes.head_weights) / flops
    each += context * sizes.key_value_bytes(work.width) / bandwidth
    prefill = prompts * work.prompt_tokens * 2 * sizes.block_weights / (rates.train_flops * card.flops)
    return (
        rates.rollout_s
        + steps * (rates.decode_layer_s * sizes.layers + read / bandwidth)
        + completions * tokens * each
        + prefill
    )


def rollout_s(work: Work, card: Card, rates: Rates) -> float:
    """Seconds of sampling in a step, beside the other runs on the card."""
    alone = sampling_s(work, work.completions, work.prompts, work.limit, card, rates)
    return alone * (1 + rates.share * (work.per_card - 1))


def train_s(work: Work, micro_batches: float, card: Card, rates: Rates) -> float:
    """Seconds of forward, backward and update in a step, beside the other runs on the card."""
    times = {"none": 1.0, "selective": rates.selective, "full": 1.5}[work.recompute] * (1 if work.rank else rates.whole)
    operations = 4 * (work.sizes.block_weights * times + work.sizes.head_weights)
    seconds = micro_batches * rates.train_layer_s * work.sizes.layers
    seconds += work.trained_tokens * operations / (rates.train_flops * card.flops)
    return seconds * (rates.modules if work.modules else 1) * (1 + rates.train_share * (work.per_card - 1))


def evaluation_s(work: Work, card: Card, rates: Rates) -> float:
    """Seconds of all evaluations and validations of a run."""
    alone = sum(sampling_s(work, asked, asked, limit, card, rates) for asked, limit in work.asked)
    return alone * (1 + rates.share * (work.per_card - 1))
