"""`logger.names=trl`: every alias on numbers that were worked out by pencil, by TRL's definition, and who reads them.

Two groups of two completions. Tokens: 2, 1, 3 and 2, of which the last completion was cut off. Rewards: 1, 0, 0.5, 0.5.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_bench.algo.base import LossInputs
from qerl_bench.algo.functional import clip_indicators
from qerl_bench.algo.kl import KLPenalty
from qerl_bench.config import compose
from qerl_bench.logger.base import ServiceMirror
from qerl_bench.logger.jsonl import LocalOnly
from qerl_bench.logger.trackio import Trackio, _kind
from qerl_core.checks import ConfigError
from qerl_core.metrics import compute
from qerl_core.metrics.definitions import definitions
from qerl_core.options.fingerprint import as_dict
from qerl_core.records import Group, Prompt, Reward, Rollout
from qerl_studies.foreign.definitions import TRL, UNREAD
from qerl_studies.foreign.trl_names import ALIASES, UNLIKE, trl_names

LENGTHS, TOTALS, CORRECT = (2, 1, 3, 2), (1.0, 0.0, 0.5, 0.5), (1.0, 0.0, 0.0, 1.0)
OLD = [0.5, 0.5, 0.25, 0.5, 0.5, 0.25, 0.5, 0.5]  # probabilities of the eight tokens: the trainer's before its update
SAMPLER = [0.5, 0.25, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5]
BASE = [0.25, 1.0, 0.25, 0.5, 0.5, 0.25, 0.5, 0.5]
RATIOS = [1.5, 1.0, 0.5, 1.0, 1.0, 1.0, 0.7, 1.5]  # after a move, with advantages of the completions below
ADVANTAGES = [1.0, 1.0, -1.0, 0.0, 0.0, 0.0, -1.0, -1.0]
LOG2 = math.log(2)
HAND = {  # by TRL's name
    "reward": 0.5,  # (1 + 0 + 0.5 + 0.5) / 4
    "reward_std": math.sqrt(0.5 / 3),  # squares 0.25 + 0.25 over n - 1
    "frac_reward_zero_std": 0.5,  # the second group
    "rewards/*/mean": 0.5,  # two right answers of four
    "completions/mean_length": 2.0,
    "completions/clipped_ratio": 0.25,
    "entropy": 0.75,  # (1 + 1 + 0 + 1 + 1 + 0 + 1 + 1) / 8
    "kl": (0.5 - 1 + LOG2 + 2 - 1 - LOG2) / 8,  # q / p = 1/2 at the first token and 2 at the second
    "clip_ratio/low_mean": 2 / 8,  # 0.5 and 0.7 below 0.8, advantage -1
    "clip_ratio/high_mean": 1 / 8,  # the first 1.5 above 1.2; the other has advantage -1
    "cispo_clip_ratio": 1 / 8,
    "sampling/sampling_logp_difference/mean": 2 * LOG2 / 8,
    "sampling/sampling_logp_difference/max": LOG2,
    "sampling/importance_sampling_ratio/mean": (1.5 + 6 + 0.5) / 8,  # weights 2, cut to 1.5, and 1/2
    "loss": -0.25,
    "grad_norm": 3.0,
    "learning_rate": 1e-5,
}


def groups() -> list[Group]:
    def rollout(place: int) -> Rollout:
        return Rollout(
            prompt=Prompt(id=str(place // 2), messages=(), answer=""), sample=place % 2, prompt_ids=[1],
            token_ids=[*range(LENGTHS[place])], logprobs=[0.0] * LENGTHS[place], entropies=[9.0] * LENGTHS[place],
            text="", finished=place != 3,
        )  # fmt: skip

    rewards = [
        Reward(total=total, correct=bool(right), parts={"correct": right})
        for total, right in zip(TOTALS, CORRECT, strict=True)
    ]
    return [Group(rollouts=[rollout(i), rollout(i + 1)], rewards=rewards[i : i + 2]) for i in (0, 2)]


def measured() -> dict[str, float]:
    """Our metrics of these completions, by the functions that runs use."""
    old, sampler, base = (torch.tensor(values, dtype=torch.float64).log() for values in (OLD, SAMPLER, BASE))
    table = compute.TokenTable()
    entropy = torch.tensor([1.0, 1, 0, 1, 1, 0, 1, 1])
    weights = (old - sampler).exp()
    table.add(logprobs=old, sampler_logprobs=sampler, entropy=entropy, entropy_t1=entropy + 5, base_gap=base - old)
    table.add(sequence_gap=torch.zeros(4), importance=weights.clamp(max=1.5), importance_raw=weights)
    ones = torch.ones(8, 1, dtype=torch.bool)
    inputs = LossInputs(
        logprobs=old[:, None], old_logprobs=old[:, None], mask=ones, advantages=torch.tensor(ADVANTAGES)
    )
    clipped = clip_indicators(torch.tensor(RATIOS)[:, None], inputs, 0.2, 0.2)
    found = compute.rollout_metrics(groups()) | compute.token_metrics(table, on_policy=True)
    found |= {name: indicator.double().mean().item() for name, indicator in clipped.items()}
    penalty = KLPenalty(coef=0.1, estimator="k3", ratio_weighted=True, every=0)
    found["kl"] = penalty.estimate(old, base, ones[:, 0]).mean().item()
    return found | {"loss": -0.25, "grad_norm": 3.0, "lr": 1e-5}


CONFIGS = {  # options that hold all conditions of `only` in turn
    "kl_to_base": ("kl.every=1", "train.mismatch_share=1"),
    "kl": ("kl.coef=0.1",),
    "cispo": ("algo=cispo",),
}


def config(*words: str) -> dict[str, Any]:
    return as_dict(compose(["experiment=smoke", *words]))


@pytest.mark.parametrize("row", ALIASES, ids=lambda row: f"{row.ours} as {row.theirs}")
def test_every_alias_is_the_number_that_its_name_has_by_hand(row: Any) -> None:
    words = next((words for key, words in CONFIGS.items() if key in (row.ours, row.theirs.split("_")[0])), ())
    name, found = trl_names(config(*words)), measured()
    ours = row.ours.replace("*", "correct")
    assert name(ours) == row.theirs.replace("*", "correct")
    assert found[ours] == pytest.approx(HAND[row.theirs]), row.theirs
    assert {one.theirs for one in ALIASES} == HAND.keys()


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["kl.coef=0.1", "kl.estimator=k2"], "kl"),
        (["kl.every=1"], "kl_to_base"),  # of an eighth of the micro-batches
        (["algo=gspo"], "clip_ratio/low_mean"),
        (["algo=rloo"], "clip_ratio/high_mean"),
        (["algo=cispo"], "clip_ratio/low_mean"),
        (
            ["importance_sampling.mode=truncate", "importance_sampling.level=sequence"],
            "importance_sampling/weight_mean",
        ),
        (["train.updates_per_batch=2"], "grad_norm"),
        (["reward=random"], "reward/correct"),
    ],
)
def test_what_options_define_otherwise_gets_no_name_of_theirs(words: list[str], ours: str) -> None:
    assert trl_names(config(*words))(ours) == f"qerl_{ours.replace('/', '_')}"


@pytest.mark.parametrize("words", [(), *CONFIGS.values(), ("algo=gspo",), ("kl.coef=0.1", "kl.every=1")])
def test_no_two_metrics_get_one_name_and_none_of_ours_looks_like_theirs(words: tuple[str, ...]) -> None:
    name = trl_names(config(*words))
    absent = {"kl"} if "kl.coef=0.1" not in words else set()  # without a penalty nobody writes it
    ours = [*({*definitions()} - absent), "reward/correct", "reward/format"]
    given = {name(one): one for one in ours}
    assert len(given) == len(ours)
    theirs = {key for key in HAND if "*" not in key}
    for new, old in given.items():
        assert new in theirs or new.startswith("rewards/") or (new.startswith("qerl_") and "/" not in new), old


def test_the_table_names_what_there_is_and_says_what_looks_alike() -> None:
    known = {*definitions(), "reward/*"}
    for row in ALIASES:
        assert row.ours in known and row.text and row.text != UNREAD, row.ours
    name = trl_names(config())
    for ours, (theirs, why) in UNLIKE.items():
        assert ours in known and theirs and why and name(ours).startswith("qerl_"), ours
    imported = {one.metric: one.key for one in TRL if one.metric}
    for ours, key in imported.items():
        assert key in {row.theirs for row in ALIASES if row.ours == ours}, "what is read as ours is written as theirs"


def test_a_file_beside_metrics_jsonl_has_each_step_once(tmp_path: Path) -> None:
    spec, given = LocalOnly(name="jsonl", names="trl"), config("kl.coef=0.1")
    first = {"reward/mean": 0.5, "mismatch/kl": 0.25, "kl": math.nan}
    records = [{"kind": "train", "step": 1, "time": 0.0} | first]
    for _ in range(2):  # of a run that was continued
        with spec.mirror(tmp_path, records, given) as mirror:
            mirror.log("eval", 2, {"eval/accuracy_greedy": 1.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics_trl.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 1, "reward": 0.5, "qerl_mismatch_kl": 0.25, "kl": None},
        {"step": 2, "qerl_eval_accuracy_greedy": 1.0},
    ]
    assert type(LocalOnly(name="jsonl", names=None).mirror(tmp_path, [], given)).__name__ == "MetricsMirror"


class Kept(ServiceMirror):
    """A service that keeps what it is sent."""

    def begin(self, spec: Any, run_dir: Path, known: str | None, config: dict[str, Any]) -> Any:
        return []

    def send(self, run: Any, kind: str, step: int, metrics: dict[str, float]) -> None:
        run.append((step, metrics))


@pytest.mark.parametrize(("names", "expected"), [("trl", "train/reward"), (None, "reward/mean")])
def test_services_get_the_names_that_transformers_gives_them(names: str | None, expected: str, tmp_path: Path) -> None:
    spec = Trackio(name="trackio", project="p", names=names)
    kept = Kept(spec, tmp_path, [{"kind": "train", "step": 1, "time": 0.0, "reward/mean": 0.5}], config())
    kept.log("train", 2, {"reward/mean": 1.0})
    assert kept.run == [(1, {expected: 0.5}), (2, {expected: 1.0})]
    kept.log("eval", 2, {"eval/accuracy_greedy": 1.0})
    assert [_kind({"step": step} | metrics) for step, metrics in kept.run or []] == ["train", "train", "eval"]


def test_another_name_than_one_of_theirs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"logger\.names .*trl.*got 'verl'"):
        Trackio(name="trackio", project="p", names="verl")
