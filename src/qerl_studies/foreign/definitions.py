"""What TRL 1.16 and verl 0.9.1 log under which key, and by which definition: read in their sources, tested on numbers.

A number gets the name of one of ours (qerl_core/metrics/definitions.py) only if its definition is the same, or differs
in nothing that `but` does not say. Any other keeps the name that it has there, behind the name of the program, so that
nobody compares it with ours; between arms of one study it is compared like any number. Keys that are not listed are
imported as they are, with `of` saying that nobody here has read their definition.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, replace

from qerl_studies.foreign.formulas import ESTIMATORS, MEANS

UNREAD = "as its program logs it; its definition was not read"


@dataclass(frozen=True)
class Definition:
    """`key` is a name of a log, in which * stands for anything. `mean` is one of MEANS, `estimator` of ESTIMATORS;
    they are empty where there is none, and `?` where the config of a run decides."""

    key: str
    of: str
    mean: str = ""
    estimator: str = ""
    metric: str = ""  # ours, if it is the same
    but: str = ""

    @property
    def text(self) -> str:
        parts = [self.of]
        parts += ["estimator by kl_type or kl_loss_type, not reported"] * (self.estimator == "?")
        parts += [ESTIMATORS[self.estimator][0]] if self.estimator in ESTIMATORS else []
        parts += ["mean by loss_agg_mode, not reported"] * (self.mean == "?")
        parts += [MEANS[self.mean][0]] if self.mean in MEANS else []
        return "; ".join([*parts, *filter(None, [self.but])])

    def named(self, tool: str, key: str) -> str:
        """The name of the metric that a log has under `key`."""
        return self.metric or f"{tool}/{key}"


REFERENCE = "KL(policy || reference) on tokens of the policy"
SAMPLER = "KL(sampler || trainer) on tokens of the sampler"
TRL = (
    Definition("reward", "weighted sum of the reward functions", "completions", metric="reward/mean"),
    Definition("reward_std", "weighted sum of the reward functions", "spread", metric="reward/std"),
    Definition(
        "frac_reward_zero_std",
        "groups whose rewards are equal",
        "groups",
        but="equal rewards that are no exact sum do not count, and scale_rewards=batch gives 0",
    ),
    Definition("rewards/*/mean", "one reward function", "completions"),
    Definition("rewards/*/std", "one reward function", "spread"),
    Definition(
        "entropy", "entropy of the trained policy at the sampling temperature, full vocabulary", "micro-batches"
    ),
    Definition("kl", REFERENCE, "micro-batches", "k3"),
    Definition(
        "completions/mean_length", "tokens, stop token included", "completions", metric="completions/mean_length"
    ),
    Definition(
        "completions/clipped_ratio",
        "1 for a completion whose last token is no stop token",
        "completions",
        metric="completions/truncated_frac",
    ),
    Definition("completions/mean_terminated_length", "tokens of completions that end with a stop token", "completions"),
    Definition("clip_ratio/low_mean", "1 for a token below 1 - epsilon with a negative advantage", "micro-batches"),
    Definition("clip_ratio/high_mean", "1 for a token above 1 + epsilon with a positive advantage", "micro-batches"),
    Definition("clip_ratio/region_mean", "1 for a token that either bound clips", "micro-batches"),
    Definition(
        "sampling/sampling_logp_difference/mean",
        "|log-probability of trainer - of sampler| of sampled tokens",
        "tokens",
    ),
)
VERL = (
    Definition(
        "critic/score/mean",
        "sum of the scores of a completion, without a KL penalty",
        "completions",
        metric="reward/mean",
        but="completions without a token are left out",
    ),
    Definition("critic/rewards/mean", "score less the KL penalty of use_kl_in_reward", "completions"),
    Definition("response_length/mean", "tokens, stop token included", "completions", metric="completions/mean_length"),
    Definition(
        "response_length/clip_ratio",
        "1 for a completion as long as the longest allowed",
        "completions",
        but="one that stops with its last allowed token counts too",
    ),
    Definition("actor/entropy", "entropy of the trainer before its update, sampling temperature, full vocabulary", "?"),
    Definition("actor/kl_loss", REFERENCE, "?", "?", but="then over mini-batches, each after its updates"),
    Definition("actor/reward_kl_penalty", REFERENCE, "sequences", "?"),
    Definition("rollout_corr/kl", SAMPLER, "tokens", "k1"),
    Definition("rollout_corr/k3_kl", SAMPLER, "tokens", "k3", metric="mismatch/kl"),
    Definition("training/rollout_probs_diff_mean", "|probability of trainer - of sampler| of sampled tokens", "tokens"),
    Definition("val-core/*/acc/mean@*", "share of right answers to a validation question", "completions"),
    Definition("val-core/*/reward/mean@*", "reward of the answers to a validation question", "completions"),
)
TABLES = {"trl": TRL, "verl": VERL}
AGGREGATIONS = {  # verl's loss_agg_mode
    "token-mean": "tokens",
    "seq-mean-token-mean": "sequences",
    "seq-mean-token-sum": "sums",
    "seq-mean-token-sum-norm": "widths",
}
PENALTIES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}  # verl's kl_loss_type


def definition_of(tool: str, key: str, options: Mapping[str, object] | None = None) -> Definition:
    """The definition of what `tool` logs under `key`; `options` of the run, by verl's dotted names, settle what they
    decide."""
    found = next((one for one in TABLES.get(tool, ()) if fnmatch.fnmatchcase(key, one.key)), Definition(key, UNREAD))
    given = options or {}
    if found.mean == "?":
        mode = str(given.get("actor_rollout_ref.actor.loss_agg_mode", ""))
        found = replace(found, mean=AGGREGATIONS.get(mode, "?"))
    if found.estimator == "?":
        place = "algorithm.kl_penalty" if key == "actor/reward_kl_penalty" else "actor_rollout_ref.actor.kl_loss_type"
        found = replace(found, estimator=PENALTIES.get(str(given.get(place, "")).removesuffix("+"), "?"))
    return found
