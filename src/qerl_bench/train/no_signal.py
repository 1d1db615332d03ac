"""What a run says that ends because no group of a step has unequal rewards (algo.on_no_signal=stop)."""

from __future__ import annotations

from qerl_core.records import Group


def no_signal_message(groups: list[Group], rounds: int) -> str:
    rewards = ", ".join(f"{reward:g}" for reward in sorted({group.rewards[0].total for group in groups}))
    return (
        f"nothing to learn from: in all {len(groups)} groups, sampled in {rounds} rounds, the completions of a group "
        f"got equal rewards (rewards: {rewards}). The task is too hard or too easy for this model: change it or warm "
        "the model up, raise rollout.group_size, rollout.prompts_per_step or algo.max_resampling_rounds, or continue "
        "without a gradient: algo.on_no_signal=continue"
    )
