"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): sample again until enough groups have something to teach.

Left out: sampling ahead while training runs, and looking at accuracy rather than reward; a group counts if its
completions did not all earn the same.
"""

from __future__ import annotations

from collections.abc import Callable

from qerl_bench.algo.base import Algorithm
from qerl_bench.checks import TrainingStopped
from qerl_bench.records import Group


def fill(sample: Callable[[int], list[Group]], algo: Algorithm, wanted: int) -> tuple[list[Group], list[Group], int]:
    """Groups to train on (at most `wanted`), all groups sampled, and the number of refills that took.

    `sample(i)` gives new groups for refill i, 0 being the first round; none means that there are no more prompts.
    Where no group at all has signal, `algo.on_no_signal` decides: "stop" raises TrainingStopped, "continue"
    returns the groups of the first round, whose gradient is zero.
    """
    sampled = sample(0)
    if algo.max_resampling_rounds == 0:
        return sampled, sampled, 0
    kept = [group for group in sampled if not group.degenerate]
    refills = 0
    while len(kept) < wanted and refills < algo.max_resampling_rounds:
        more = sample(refills + 1)
        if not more:
            break
        refills += 1
        sampled = sampled + more
        kept += [group for group in more if not group.degenerate]
    if kept:
        return kept[:wanted], sampled, refills
    if algo.on_no_signal == "stop":
        earned = ", ".join(f"{reward:g}" for reward in sorted({group.rewards[0].total for group in sampled}))
        raise TrainingStopped(
            f"nothing to learn from: in all {len(sampled)} groups, sampled in {refills + 1} rounds, the completions of "
            f"a group earned the same (rewards: {earned}). The task is too hard or too easy for this model: change it "
            "or warm the model up, raise rollout.group_size, rollout.prompts_per_step or algo.max_resampling_rounds, or go on without a "
            "gradient: algo.on_no_signal=continue"
        )
    return sampled[:wanted], sampled, refills
