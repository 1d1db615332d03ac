"""What others log, by their definitions: every one of the table on numbers that were computed by hand.

Two completions of three and one tokens, in one batch of two columns of padding for the second; p and q are
log-probabilities of the sampled tokens. Numbers in HAND are worked out from these by pencil, not by the code.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from qerl_core.metrics.definitions import definitions
from qerl_studies.foreign import formulas
from qerl_studies.foreign.definitions import AGGREGATIONS, PENALTIES, TABLES, UNREAD, definition_of
from qerl_studies.foreign.formulas import ESTIMATORS, MEANS

MASK = np.array([[1, 1, 1], [1, 0, 0]])
TOKENS = np.array([[1.0, 2.0, 3.0], [6.0, 9.0, 9.0]])  # what stands in padding must not count
REWARDS = np.array([1.0, 0.0, 1.0, 1.0])
GROUPS = np.array([[0.5, 0.5], [1.0, 0.0]])
P, Q = np.log([[0.5, 0.25]]), np.log([[0.25, 0.5]])

HAND_OF_MEANS = {  # by name of MEANS
    "completions": (formulas.of_completions, (REWARDS,), 3 / 4),
    "spread": (formulas.spread_of_completions, (REWARDS,), 0.5),  # squares 9/16 + 3 x 1/16 over 3
    "groups": (formulas.equal_groups, (GROUPS,), 1 / 2),
    "tokens": (formulas.over_tokens, (TOKENS, MASK), 3.0),  # (1 + 2 + 3 + 6) / 4
    "micro-batches": (formulas.over_micro_batches, (TOKENS, MASK, 1), 4.0),  # (2 + 6) / 2
    "sequences": (formulas.over_sequences, (TOKENS, MASK), 4.0),  # (2 + 6) / 2
    "sums": (formulas.over_sums, (TOKENS, MASK), 6.0),  # (6 + 6) / 2
    "widths": (formulas.over_widths, (TOKENS, MASK), 2.0),  # 6 / 3 columns
}
HAND_OF_ESTIMATORS = {  # of p = 1/2, 1/4 from q = 1/4, 1/2
    "k1": (math.log(2), -math.log(2)),
    "k2": (math.log(2) ** 2 / 2, math.log(2) ** 2 / 2),
    "k3": (0.5 - 1 + math.log(2), 2 - 1 - math.log(2)),
}


def test_every_mean_and_estimator_is_as_by_hand() -> None:
    assert HAND_OF_MEANS.keys() == MEANS.keys() and HAND_OF_ESTIMATORS.keys() == ESTIMATORS.keys()
    for name, (function, given, expected) in HAND_OF_MEANS.items():
        assert MEANS[name][1] is function
        assert function(*given) == pytest.approx(expected), name
    for name, expected in HAND_OF_ESTIMATORS.items():
        assert ESTIMATORS[name][1](P, Q)[0] == pytest.approx(expected), name


def test_what_cannot_be_graded_or_has_no_token_is_left_out() -> None:
    assert formulas.of_completions(np.array([1.0, np.nan, 0.0])) == 0.5
    assert formulas.spread_of_completions(np.array([1.0, np.nan, 0.0])) == pytest.approx(math.sqrt(0.5))
    empty = np.array([[1, 1, 1], [0, 0, 0]])
    assert formulas.over_sequences(TOKENS, empty) == 2.0 and formulas.over_sums(TOKENS, empty) == 6.0


def test_the_width_of_a_batch_changes_one_mean_alone() -> None:
    """Ten more columns of padding: the loss by seq-mean-token-sum-norm falls, no other mean does."""
    wide, mask = np.pad(TOKENS, ((0, 0), (0, 9))), np.pad(MASK, ((0, 0), (0, 9)))
    assert formulas.over_widths(wide, mask) == pytest.approx(0.5)
    for function in (formulas.over_tokens, formulas.over_sequences, formulas.over_sums):
        assert function(wide, mask) == function(TOKENS, MASK)


def test_means_of_micro_batches_depend_on_how_a_step_is_split() -> None:
    assert formulas.over_micro_batches(TOKENS, MASK, 2) == 3.0 != formulas.over_micro_batches(TOKENS, MASK, 1)


def test_entropy_is_that_of_the_tempered_distribution() -> None:
    logits = np.log([[0.5, 0.25, 0.25]])
    assert formulas.entropy(logits, 1.0)[0] == pytest.approx(1.5 * math.log(2))
    tempered = np.array([4, 1, 1]) / 6  # squares of the weights 2, 1, 1
    assert formulas.entropy(logits, 0.5)[0] == pytest.approx(-(tempered * np.log(tempered)).sum())
    assert formulas.entropy(np.array([[1000.0, 1000.0]]), 1.0)[0] == pytest.approx(math.log(2))


# key of a log: name in a study, mean, estimator. Every definition of the table is here once.
EXPECTED = {
    "trl": {
        "reward": ("reward/mean", "completions", ""),
        "reward_std": ("reward/std", "spread", ""),
        "frac_reward_zero_std": ("trl/frac_reward_zero_std", "groups", ""),
        "rewards/right/mean": ("trl/rewards/right/mean", "completions", ""),
        "rewards/right/std": ("trl/rewards/right/std", "spread", ""),
        "entropy": ("trl/entropy", "micro-batches", ""),
        "kl": ("trl/kl", "micro-batches", "k3"),
        "completions/mean_length": ("completions/mean_length", "completions", ""),
        "completions/clipped_ratio": ("completions/truncated_frac", "completions", ""),
        "completions/mean_terminated_length": ("trl/completions/mean_terminated_length", "completions", ""),
        "clip_ratio/low_mean": ("trl/clip_ratio/low_mean", "micro-batches", ""),
        "clip_ratio/high_mean": ("trl/clip_ratio/high_mean", "micro-batches", ""),
        "clip_ratio/region_mean": ("trl/clip_ratio/region_mean", "micro-batches", ""),
        "sampling/sampling_logp_difference/mean": ("trl/sampling/sampling_logp_difference/mean", "tokens", ""),
    },
    "verl": {
        "critic/score/mean": ("reward/mean", "completions", ""),
        "critic/rewards/mean": ("verl/critic/rewards/mean", "completions", ""),
        "response_length/mean": ("completions/mean_length", "completions", ""),
        "response_length/clip_ratio": ("verl/response_length/clip_ratio", "completions", ""),
        "actor/entropy": ("verl/actor/entropy", "?", ""),
        "actor/kl_loss": ("verl/actor/kl_loss", "?", "?"),
        "actor/reward_kl_penalty": ("verl/actor/reward_kl_penalty", "sequences", "?"),
        "rollout_corr/kl": ("verl/rollout_corr/kl", "tokens", "k1"),
        "rollout_corr/k3_kl": ("mismatch/kl", "tokens", "k3"),
        "training/rollout_probs_diff_mean": ("verl/training/rollout_probs_diff_mean", "tokens", ""),
        "val-core/gsm8k/acc/mean@4": ("verl/val-core/gsm8k/acc/mean@4", "completions", ""),
        "val-core/gsm8k/reward/mean@4": ("verl/val-core/gsm8k/reward/mean@4", "completions", ""),
    },
}


@pytest.mark.parametrize("tool", TABLES)
def test_each_key_has_its_name_mean_and_estimator(tool: str) -> None:
    expected = EXPECTED[tool]
    assert len(expected) == len(TABLES[tool])
    for key, (metric, mean, estimator) in expected.items():
        found = definition_of(tool, key)
        assert (found.named(tool, key), found.mean, found.estimator) == (metric, mean, estimator), key
        assert found.text != UNREAD and found.of in found.text


def test_a_name_of_ours_is_given_to_the_same_definition_alone() -> None:
    """Names of ours are in our table; what is averaged, estimated or measured otherwise keeps its own."""
    for tool, table in TABLES.items():
        for one in table:
            assert not one.metric or one.metric in definitions()
            assert one.metric or "/" in one.named(tool, one.key)
    assert "k3" in definitions()["mismatch/kl"] and definition_of("verl", "rollout_corr/k3_kl").metric == "mismatch/kl"
    assert not definition_of("trl", "entropy").metric, "of the trainer, and a mean of means"


def test_what_the_config_decides_is_read_from_it_or_said_to_be_unknown() -> None:
    place = "actor_rollout_ref.actor"
    options = {f"{place}.loss_agg_mode": "seq-mean-token-mean", f"{place}.kl_loss_type": "low_var_kl"}
    found = definition_of("verl", "actor/kl_loss", options)
    assert (found.mean, found.estimator) == ("sequences", "k3") and "k3" in found.text
    assert definition_of("verl", "actor/kl_loss", {f"{place}.kl_loss_type": "k1+"}).estimator == "k1"
    assert definition_of("verl", "actor/reward_kl_penalty", {"algorithm.kl_penalty": "mse"}).estimator == "k2"
    unknown = definition_of("verl", "actor/entropy", {f"{place}.loss_agg_mode": "another"})
    assert unknown.mean == "?" and "not reported" in unknown.text
    assert {*AGGREGATIONS.values()} <= {*MEANS} and {*PENALTIES.values()} == {*ESTIMATORS}


def test_a_key_that_nobody_read_says_so() -> None:
    found = definition_of("trl", "rewards/median")
    assert found.text == f"{UNREAD}" and found.named("trl", "rewards/median") == "trl/rewards/median"
