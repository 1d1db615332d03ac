"""A policy on a base in another format than it was trained on: everything but the packed layers is the policy's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from qerl_bench.commands.eval import main as evaluate_again
from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build
from qerl_bench.experiment import collect_rollouts
from qerl_bench.model_setup import build_policy
from qerl_bench.run_setup import on_base_of
from qerl_bench.train.trainer_state import TrainerState
from qerl_core.checks import ConfigError
from qerl_core.process.device import PhaseTimer
from qerl_core.rundir.finished_run import without_training
from qerl_studies.runs.load import load_run
from tests.short_runs import killed_in_step

IDS = torch.arange(24).reshape(2, 12) % 97


def logprobs(policy: Any) -> torch.Tensor:
    with torch.no_grad():
        return policy.token_stats(IDS, torch.ones_like(IDS, dtype=torch.bool) & (IDS > 0), 1.0).logprobs


@pytest.mark.parametrize(
    ("trained", "other", "words"),
    [
        ("bf16", "nvfp4", ("lora.train_norms=true",)),
        ("nvfp4", "mxfp4", ()),
        ("mxfp4", "bf16", ("lora.targets=[q_proj,down_proj]",)),
    ],
)
def test_it_is_the_policy_that_its_checkpoint_makes_on_that_base(
    trained: str, other: str, words: tuple[str, ...], make_experiment: Any, make_policy: Any, tmp_path: Path
) -> None:
    policy = make_policy(*words, quant=trained, sharp=True, adapted=True)
    with torch.no_grad():
        for norm in policy.norms.values() if words and "norms" in words[0] else ():
            norm.weight.mul_(1.5)
    policy.save(tmp_path)
    experiment = make_experiment(f"quant={trained}", "model.hidden_size=32", *words)
    expected = build_policy(make_experiment(f"quant={other}", "model.hidden_size=32", *words), None, "cpu")
    with torch.no_grad():
        expected.model.model.norm.weight.copy_(policy.model.model.norm.weight)
    expected.load(tmp_path)
    answering = experiment.in_format("eval.quant", other)
    engine = experiment.engine.build(policy)
    state = TrainerState()
    with on_base_of(answering, "eval.quant", experiment, policy, engine, state) as (copy, engine):
        assert vars(engine)["policy"] is copy is not policy
        assert state.engines == [engine] and vars(engine)["state"] is state  # shortages are those of the run
        assert torch.equal(logprobs(copy), logprobs(expected))
        assert not torch.equal(logprobs(copy), logprobs(policy))
        with copy.without_adapter(), expected.without_adapter():
            assert torch.equal(logprobs(copy), logprobs(expected))
        with torch.no_grad():
            policy.trainable[0].add_(1.0)
        assert not torch.equal(logprobs(copy), logprobs(expected))  # it follows the training
    assert state.engines == []


def test_with_the_format_of_training_nothing_is_made(make_experiment: Any, make_policy: Any) -> None:
    experiment, policy = make_experiment("quant=nvfp4", "eval.quant=nvfp4"), make_policy()
    engine = experiment.engine.build(policy)
    for name in (None, "nvfp4"):
        with on_base_of(experiment.in_format("eval.quant", name), "eval.quant", experiment, policy, engine) as same:
            assert same == (policy, engine)


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, make_config: Callable[..., Any], no_figures: None
) -> dict[str, Path]:
    """A run that is evaluated in the format of training, and the same run evaluated in another."""
    root = tmp_path_factory.mktemp("root")
    for name, quant in (("as_trained", "null"), ("served", "mxfp4")):
        words = ("task=even_characters", "optim.lr=0.05", "lora.dropout=0.1", "eval.every=2", "eval.samples=4")
        cfg = make_config(*words, f"eval.quant={quant}", f"root={root}", f"name={name}")
        run_experiment(build(cfg), cfg)
    return {name: root / "runs" / name for name in ("as_trained", "served")}


def train_records(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocks = ("time", "speed/", "memory/")
    return [{k: v for k, v in one.items() if not k.startswith(clocks)} for one in records if one["kind"] == "train"]


def test_training_does_not_see_the_format_of_evaluations(runs: dict[str, Path]) -> None:
    assert train_records(runs["served"]) == train_records(runs["as_trained"])
    accuracy = [load_run(runs[name]).series("validation", "validation/accuracy_sampled") for name in runs]
    assert len(accuracy[0]) == len(accuracy[1]) == 3


def test_it_is_what_a_later_evaluation_in_that_format_finds(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate_again([str(runs["as_trained"]), "eval.quant=mxfp4", f"out={tmp_path / 'again'}"])
    served, again, as_trained = (
        pd.read_parquet(folder / "samples.parquet")
        for folder in (runs["served"], tmp_path / "again", runs["as_trained"])
    )
    pd.testing.assert_frame_equal(served, again)
    assert not served["completion"].equals(as_trained["completion"])


def test_an_engine_that_cannot_sample_in_another_format_can_evaluate_what_was_trained_so(make_config: Any) -> None:
    trained = make_config("quant=bf16", "rollout.quant=nvfp4")
    trained.engine = make_config("engine=vllm").engine
    with pytest.raises(ConfigError, match=r"rollout\.quant"):
        build(trained)
    assert build(without_training(trained)).rollout.quant is None


def test_the_record_says_in_which_format(runs: dict[str, Path]) -> None:
    for name, quant in (("as_trained", "bf16"), ("served", "mxfp4")):
        entries = json.loads((runs[name] / "eval.json").read_text())
        assert {entry["settings"]["quant"] for entry in entries} == {quant}
    assert load_run(runs["served"]).config_items["eval.quant"] == "mxfp4"
    assert "eval.quant" not in load_run(runs["as_trained"]).config_items  # as runs from before it was an option


@pytest.mark.parametrize(("trained", "sampled"), [("bf16", "nvfp4"), ("mxfp4", "bf16")])
def test_rollouts_come_from_the_other_format_with_noise_and_adapter(
    trained: str, sampled: str, make_experiment: Any, make_policy: Any
) -> None:
    """The sampler's numbers are those of a policy that is trained in its format, noise included."""
    words = (f"rollout.quant={sampled}", "aqn=constant", "aqn.level=0.05")
    experiment, policy = make_experiment(f"quant={trained}", *words), make_policy(*words, quant=trained)
    other = make_experiment(f"quant={sampled}", *words[1:])
    alone = make_policy(*words[1:], quant=sampled)
    for adapted in (policy, alone):
        with torch.no_grad():
            for parameter in adapted.trainable:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    engine = experiment.engine.build(policy)
    with on_base_of(experiment.sampled, "rollout.quant", experiment, policy, engine) as (copy, sampler):
        groups, _, measured = collect_rollouts(experiment, policy, sampler, 1, PhaseTimer("cpu"))
        assert torch.equal(logprobs(copy), logprobs(alone))  # the noise is out again
    expected, _, _ = collect_rollouts(other, alone, other.engine.build(alone), 1, PhaseTimer("cpu"))
    assert groups == expected
    as_trained, _, _ = collect_rollouts(experiment, policy, engine, 1, PhaseTimer("cpu"))
    assert groups != as_trained and measured["aqn/sigma_realised"] == pytest.approx(0.05, rel=0.2)


def test_the_gap_between_the_formats_is_measured(tmp_path: Path, make_config: Any, no_figures: None) -> None:
    gaps = {}
    for name, quant in (("one", "null"), ("two", "nvfp4")):
        words = ("quant=bf16", f"rollout.quant={quant}", "task=even_characters", "optim.lr=0.05", "eval.every=0")
        cfg = make_config(*words, f"root={tmp_path}", f"name={name}")
        run_experiment(build(cfg), cfg)
        folder = tmp_path / "runs" / name
        gaps[name] = [record["mismatch/kl"] for record in train_records(folder)]
        record = json.loads((folder / "engine.json").read_text())
        assert (record["quant"], record["copies_of_weights"]) == {"one": ("bf16", 1), "two": ("nvfp4", 2)}[name]
    assert min(gaps["two"]) > 100 * max(gaps["one"])
    one, two = (pd.read_parquet(tmp_path / "runs" / name / "samples.parquet").query("step == 0") for name in gaps)
    pd.testing.assert_frame_equal(one, two)  # evaluations are of the format of training


def test_a_run_with_two_formats_continues_to_the_bit(tmp_path: Path, make_config: Any, no_figures: None) -> None:
    words = ("quant=bf16", "rollout.quant=mxfp4", "aqn=exp", "reward=random", "eval=none", "train.kept_groups=0")
    whole, halves = (make_config(*words, f"root={tmp_path}", f"name={name}") for name in ("whole", "halves"))
    with killed_in_step(3):
        run_experiment(build(halves), halves)
    for cfg in (whole, halves):
        run_experiment(build(cfg), cfg)
    records = [train_records(tmp_path / "runs" / name) for name in ("whole", "halves")]
    assert len(records[0]) == 4 and records[0] == records[1]
