"""Every metric against a brute-force version in plain Python, and the list of names against what a real step emits."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_bench.engine.hf import HFEngine
from qerl_bench.eval.base import metrics_of
from qerl_bench.eval.record import record_evaluation
from qerl_bench.experiment import collect_rollouts, train_step
from qerl_bench.model.policy import Policy
from qerl_bench.model_setup import build_policy
from qerl_bench.run_setup import Setup
from qerl_bench.train.batch import make_batch
from qerl_bench.train.lag import Lag
from qerl_bench.train.trainer_state import TrainerState
from qerl_bench.train.update import make_optimizer
from qerl_core.metrics import compute, definitions
from qerl_core.process.device import PhaseTimer
from qerl_core.records import Group, Prompt, Reward, Rollout
from qerl_core.rundir.run_dir import RunDir
from qerl_kernels.loss_head import entropy_of

PARTS = {"reward/correct", "reward/format"}  # reward/<part>, as task=arithmetic names its parts


def _random_groups(draw: random.Random, count: int, size: int) -> list[Group]:
    groups = []
    for group in range(count):
        rollouts, rewards = [], []
        prompt = Prompt(id=f"p{group}", messages=(), answer="1")
        for sample in range(size):
            length = draw.randint(1, 9)
            rollouts.append(
                Rollout(
                    prompt=prompt,
                    sample=sample,
                    prompt_ids=[1] * draw.randint(1, 5),
                    token_ids=[2] * length,
                    logprobs=[-draw.random() for _ in range(length)],
                    entropies=[draw.random() for _ in range(length)],
                    text="",
                    finished=draw.random() < 0.7,
                )
            )
            correct, formed = draw.random() < 0.5 and group > 0, draw.random() < 0.8 and group > 0
            rewards.append(
                Reward(
                    total=correct + 0.2 * formed,
                    correct=correct,
                    parts={"correct": float(correct), "format": float(formed)},
                )
            )
        groups.append(Group(rollouts=rollouts, rewards=rewards))
    return groups


@pytest.mark.parametrize("seed", range(5))
def test_metrics_of_rollouts_against_loops(seed: int) -> None:
    size = 3
    groups = _random_groups(random.Random(seed), 4, size)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [reward for group in groups for reward in group.rewards]
    found = compute.rollout_metrics(groups)
    totals = [reward.total for reward in rewards]
    average = math.fsum(totals) / 12
    entropies = [entropy for rollout in rollouts for entropy in rollout.entropies]
    top = [one for one in entropies if sum(other > one for other in entropies) < round(0.2 * len(entropies))]
    rest = [one for one in entropies if one not in top]
    assert 1 < len(top) < len(rest)
    same = 0
    for group in range(4):
        first = totals[group * size]
        same += all(totals[group * size + i] == first for i in range(size))
    assert same >= 1  # group 0 is all wrong
    expected = {
        "reward/mean": average,
        "reward/std": math.sqrt(math.fsum((total - average) ** 2 for total in totals) / 11),
        "reward/correct": sum(reward.correct for reward in rewards) / 12,
        "reward/format": sum(reward.parts["format"] for reward in rewards) / 12,
        "reward/frac_zero_std": same / 4,
        "accuracy": sum(reward.correct for reward in rewards) / 12,
        "entropy": math.fsum(entropies) / len(entropies),  # every token weighs the same, whoever its sequence
        "entropy/top20": math.fsum(top) / len(top),
        "entropy/rest": math.fsum(rest) / len(rest),
        "completions/tokens": sum(len(rollout.token_ids) for rollout in rollouts),
        "completions/mean_length": sum(len(rollout.token_ids) for rollout in rollouts) / 12,
        "completions/truncated_frac": sum(not rollout.finished for rollout in rollouts) / 12,
        "completions/garbled_frac": 0.0,
    }
    assert found == pytest.approx(expected, abs=1e-12)


def test_entropy_of_a_step_weighs_tokens_not_sequences() -> None:
    """One token of 3 nats beside three of 1 nat: 1.5 per token, not the 2 that a mean of means would give."""
    (group,) = _random_groups(random.Random(0), 1, 2)
    values = ([3.0], [1.0, 1.0, 1.0])
    rollouts = [
        Rollout(
            prompt=r.prompt,
            sample=i,
            prompt_ids=[1],
            token_ids=[0] * len(e),
            logprobs=e,
            entropies=e,
            text="",
            finished=True,
        )
        for i, (r, e) in enumerate(zip(group.rollouts, values, strict=True))
    ]
    found = compute.rollout_metrics([Group(rollouts=rollouts, rewards=group.rewards)])
    assert (found["entropy"], found["entropy/top20"], found["entropy/rest"]) == (1.5, 3.0, 1.0)


def test_a_single_token_is_both_parts() -> None:
    assert compute.entropy_by_part([0.7]) == {"entropy/top20": 0.7, "entropy/rest": 0.7}


def test_deviation_of_one_value_is_zero() -> None:
    assert compute.sample_std([3.0]) == 0.0
    assert compute.sample_std([1.0, 3.0]) == pytest.approx(math.sqrt(2), abs=1e-15)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("parts", [1, 3])
def test_metrics_of_tokens_against_loops(seed: int, parts: int) -> None:
    """Gathered from micro-batches of different widths, as one mean over all tokens."""
    generator = torch.Generator().manual_seed(seed)
    table = compute.TokenTable()
    rows: dict[str, list[float]] = {}
    sequences: list[float] = []
    for part in range(parts):
        shape = (2 + part, 5 - part)
        mask = torch.rand(shape, generator=generator) < 0.6
        mask[0] = part > 0  # an empty row
        mask[1, 1] = True
        columns = {
            name: torch.randn(shape, generator=generator)
            for name in ("entropy", "entropy_t1", "logprobs", "sampler_logprobs")
        }
        table.add(**{name: values[mask] for name, values in columns.items()})
        gaps_of_rows = [
            math.fsum(
                columns["logprobs"][i, j].item() - columns["sampler_logprobs"][i, j].item()
                for j in range(shape[1])
                if mask[i, j]
            )
            for i in range(shape[0])
            if mask[i].any()
        ]
        sequences += gaps_of_rows
        summed = torch.tensor(gaps_of_rows, dtype=torch.float64)
        table.add(sequence_gap=summed)
        for name, values in columns.items():
            for i in range(shape[0]):
                rows.setdefault(name, []).extend(float(values[i, j]) for j in range(shape[1]) if mask[i, j])
    count = len(rows["entropy"])
    gaps = [a - b for a, b in zip(rows["logprobs"], rows["sampler_logprobs"], strict=True)]
    weights = [math.exp(gap) for gap in gaps]
    expected = {
        "entropy_clean": math.fsum(rows["entropy"]) / count,
        "entropy_t1": math.fsum(rows["entropy_t1"]) / count,
        "mismatch/kl": math.fsum(w - gap - 1 for w, gap in zip(weights, gaps, strict=True)) / count,
        "mismatch/logp_abs_mean": math.fsum(abs(gap) for gap in gaps) / count,
        "mismatch/logp_abs_max": max(abs(gap) for gap in gaps),
        "mismatch/ess": math.fsum(weights) ** 2 / (count * math.fsum(w * w for w in weights)),
        "mismatch/ess_sequence": math.fsum(map(math.exp, sequences)) ** 2
        / (len(sequences) * math.fsum(math.exp(2 * gap) for gap in sequences)),
    }
    assert compute.token_metrics(table, on_policy=True) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert compute.token_metrics(table, on_policy=False) == pytest.approx(
        {name: expected[name] for name in ("entropy_clean", "entropy_t1")}, rel=1e-12
    )


def test_no_mismatch_and_total_mismatch() -> None:
    same = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    assert compute.mismatch_metrics(same, same) == {
        "mismatch/kl": 0.0,
        "mismatch/logp_abs_mean": 0.0,
        "mismatch/logp_abs_max": 0.0,
        "mismatch/ess": 1.0,
    }
    trainer, sampler = torch.tensor([[0.0, -50.0, -50.0], [-50.0, 0.0, 0.0]], dtype=torch.float64)
    one_token_counts = compute.mismatch_metrics(trainer, sampler)
    assert one_token_counts["mismatch/ess"] == pytest.approx(1 / 3)


def test_the_kl_estimate_has_the_right_sign_and_size() -> None:
    """k3 averaged over tokens that the sampler drew is KL(sampler || trainer), exactly so in right proportions."""
    sampler, trainer = torch.tensor([0.5, 0.25, 0.25]).double(), torch.tensor([0.25, 0.25, 0.5]).double()
    tokens = torch.tensor([0, 0, 1, 2])
    kl = sum(float(p) * math.log(p / q) for p, q in zip(sampler, trainer, strict=True))
    assert compute.mismatch_metrics(trainer.log()[tokens], sampler.log()[tokens])["mismatch/kl"] == pytest.approx(
        kl, abs=1e-12
    )


def test_entropy_by_hand() -> None:
    """Three tokens with probabilities 1/2, 1/4, 1/4: 1.5 bits = 1.5 ln 2 nats; at T = 1/2 they are 2/3, 1/6, 1/6."""
    logits = torch.tensor([2.0, 1.0, 1.0]).double() * math.log(2)
    assert entropy_of(logits.log_softmax(-1)).item() == pytest.approx(1.5 * math.log(2), abs=1e-15)
    half = 2 / 3 * math.log(3 / 2) + 1 / 3 * math.log(6)
    assert entropy_of((logits / 0.5).log_softmax(-1)).item() == pytest.approx(half, abs=1e-15)
    assert entropy_of(torch.zeros(2, 3).double().log_softmax(-1)).tolist() == pytest.approx(
        [math.log(3)] * 2, abs=1e-15
    )


# --- a real step -----------------------------------------------------------------------------------------------------


class RewardForLetters:
    """The arithmetic task with a reward that an untrained model can earn: by how many distinct letters it wrote."""

    def __init__(self, task: Any) -> None:
        self.task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def reward(self, prompt: Prompt, completion: str, finished: bool = True) -> Reward:
        many, odd = len(set(completion)) > 6, bool(len(completion) % 2)
        return Reward(total=many + 0.2 * odd, correct=many, parts={"correct": float(many), "format": float(odd)})

    def rewards(self, rollouts: list[Rollout]) -> list[Reward]:
        return [self.reward(rollout.prompt, rollout.text) for rollout in rollouts]


class Step:
    """One tiny optimizer step, with what is needed to work its numbers out again."""

    def __init__(self, experiment: Any, config: Any, folder: Path) -> None:
        experiment = dataclasses.replace(experiment, task=RewardForLetters(experiment.task))
        self.experiment = experiment
        self.policy = self.fresh_policy()
        self.engine = experiment.engine.build(self.policy)
        self.run = RunDir(folder, config)
        with self.run:
            optimizer, lag = make_optimizer(self.policy, experiment.optim), Lag(self.policy.trainable, 0)
            setup = Setup(experiment, self.policy, self.engine, self.run, TrainerState())
            self.found = train_step(setup, optimizer, lag, 3)

    def fresh_policy(self) -> Policy:
        """The policy before the step. It stops at one token in twelve, so that lengths differ."""
        policy = build_policy(self.experiment, None, "cpu")
        policy.stop_ids = frozenset({*policy.stop_ids, *range(3, 262, 12)})
        return policy


NOISY = (
    "quant=nvfp4",
    "aqn=exp",
    "aqn.sigma_start=0.5",
    "aqn.stages=3",
    "train.micro_batch_tokens=600",
    "train.mismatch_share=1",
    "rollout.temperature=0.8",
)


@pytest.fixture(scope="module", params=["grpo", "dapo"])
def sampled(
    request: pytest.FixtureRequest,
    make_experiment: Callable[..., Any],
    make_config: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Step:
    words = (*NOISY, f"algo={request.param}")
    return Step(make_experiment(*words), make_config(*words), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def sft(
    make_experiment: Callable[..., Any], make_config: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Step:
    words = ("quant=nvfp4", "algo=sft", "train.micro_batch_tokens=400")
    return Step(make_experiment(*words), make_config(*words), tmp_path_factory.mktemp("sft"))


def test_the_documented_names_are_those_of_a_sampled_step(sampled: Step) -> None:
    always = (
        definitions.ROLLOUT,
        definitions.TRAIN,
        definitions.MISMATCH_SPLIT,
        definitions.NOISE_DOSE,
        definitions.BY_SIGN,
    )
    bins = {f"mismatch/kl_by_position_{first}" for first in (1, 4)}  # of 12 tokens
    assert set(sampled.found) == {name for table in always for name in table} | bins | PARTS


def test_the_documented_names_are_those_of_a_supervised_step(sft: Step) -> None:
    assert set(sft.found) == set(definitions.TRAIN)


def test_every_metric_has_a_unit_and_a_definition_and_one_place() -> None:
    tables = definitions.TABLES.values()
    for table in tables:
        assert all(metric.unit and metric.definition for metric in table.values())
    assert sum(map(len, tables)) == len({name for table in tables for name in table})


def test_the_names_of_an_evaluation(sampled: Step, make_config: Callable[..., Any], tmp_path: Path) -> None:
    experiment = sampled.experiment
    evaluation = experiment.eval.evaluate(sampled.policy, sampled.engine, experiment.task, sampled.run, experiment.seed)
    with RunDir(tmp_path, make_config()) as run:
        assert set(metrics_of(record_evaluation(run, "arithmetic", 0, evaluation))) == set(definitions.EVAL)
        later = metrics_of(record_evaluation(run, "arithmetic", 3, evaluation))
    assert set(later) == set(definitions.EVAL) | set(definitions.EVAL_GAIN)
    assert {later[name] for name in ("eval/gain_greedy", "eval/gain_sampled")} == {0.0}


def test_every_number_of_a_step_is_a_finite_float(sampled: Step, sft: Step) -> None:
    for found in (sampled.found, sft.found):
        assert all(type(value) in (float, int) and math.isfinite(value) for value in found.values())


def test_times_speeds_and_memory_of_a_step_fit_together(sampled: Step, sft: Step) -> None:
    found = sampled.found
    phases = [found[f"time/{name}_s"] for name in ("sync", "rollout", "reward", "train")]
    assert all(seconds > 0 for seconds in phases) and sum(phases) <= found["time/step_s"]
    completion_tokens = found["completions/mean_length"] * 12
    assert found["speed/rollout_tok_s"] * found["time/rollout_s"] == pytest.approx(completion_tokens)
    rollouts = _step_rollouts(sampled)
    all_tokens = sum(len(r.prompt_ids) + len(r.token_ids) for r in rollouts)
    assert found["speed/train_tok_s"] * found["time/train_s"] == pytest.approx(all_tokens)
    assert sft.found["time/train_s"] <= sft.found["time/step_s"]
    for step in (sampled, sft):
        assert 0 < step.found["memory/train_gib"] <= step.found["memory/peak_gib"] < 100
    assert 0 < found["memory/rollout_gib"] <= found["memory/peak_gib"]


def test_the_noise_of_a_step_is_what_the_schedule_asks_for(sampled: Step) -> None:
    sigma = sampled.experiment.aqn.sigma(3, 4)
    assert sigma > 0
    assert sampled.found["aqn/sigma"] == sigma
    assert sampled.found["aqn/norms_perturbed"] == 4
    assert sampled.found["aqn/sigma_realised"] == pytest.approx(sigma, rel=5 / (2 * 4 * 32) ** 0.5)


def _step_rollouts(step: Step) -> list[Rollout]:
    """The rollouts of the step once more: sampling depends on nothing but weights, noise and seeds."""
    fresh = step.fresh_policy()
    caught: list[Rollout] = []

    class Listening(HFEngine):
        def generate(self, prompts: Any, sampling: Any) -> list[Rollout]:
            caught.extend(super().generate(prompts, sampling))
            return caught

    engine = Listening(fresh, step.experiment.engine.max_num_seqs)
    collect_rollouts(step.experiment, fresh, engine, 3, PhaseTimer("cpu"))
    return caught


def test_the_numbers_of_a_sampled_step_from_scratch(sampled: Step) -> None:
    """Loss, gradient norm, entropies and mismatch once more: sequence by sequence, transformers' logits, loops."""
    step, experiment, found = sampled, sampled.experiment, sampled.found
    rollouts = _step_rollouts(sampled)
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    rewards = [experiment.task.reward(r.prompt, r.text).total for r in rollouts]
    shaped = list(rewards)
    if experiment.algo.name == "dapo":  # the last fifth of 12 tokens costs up to 1
        shaped = [w - min(1, max(0, (len(r.token_ids) - 9.6) / 2.4)) for r, w in zip(rollouts, rewards, strict=True)]
        assert shaped != rewards
    fresh = step.fresh_policy()
    temperature = 0.8
    loss = torch.zeros(())
    entropies, entropies_t1, gaps = [], [], []
    for index, rollout in enumerate(rollouts):
        group = shaped[index // 4 * 4 : index // 4 * 4 + 4]
        centre = sum(group) / 4
        deviation = math.sqrt(sum((reward - centre) ** 2 for reward in group) / 3)
        advantage = (shaped[index] - centre) / (deviation + 1e-4)
        ids = torch.tensor([rollout.prompt_ids + rollout.token_ids])
        logits = fresh.model(input_ids=ids, use_cache=False).logits[0].float()
        terms = []
        for offset, token in enumerate(rollout.token_ids):
            row = logits[len(rollout.prompt_ids) + offset - 1]
            logprobs = (row / temperature).log_softmax(-1)
            terms.append(-advantage * torch.exp(logprobs[token] - logprobs[token].detach()))
            gaps.append(logprobs[token].item() - rollout.logprobs[offset])
            entropies.append(-sum(p * math.log(p) for p in logprobs.exp().tolist()))
            entropies_t1.append(-sum(p * math.log(p) for p in row.softmax(-1).tolist()))
        row_loss = torch.stack(terms)
        loss = loss + (row_loss.mean() / len(rollouts) if experiment.algo.name == "grpo" else row_loss.sum() / tokens)
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in fresh.trainable if p.grad is not None))
    weights = [math.exp(gap) for gap in gaps]
    expected = {
        "loss": loss.item(),
        "grad_norm": norm,
        "entropy_clean": sum(entropies) / len(entropies),
        "entropy_t1": sum(entropies_t1) / len(entropies_t1),
        "mismatch/logp_abs_mean": sum(map(abs, gaps)) / len(gaps),
        "mismatch/logp_abs_max": max(map(abs, gaps)),
        "mismatch/kl": sum(w - gap - 1 for w, gap in zip(weights, gaps, strict=True)) / len(gaps),
        "clip_ratio/low_mean": 0.0,
        "clip_ratio/high_mean": 0.0,
        "lr": experiment.optim.lr,
        "reward/mean": sum(rewards) / 12,
    }
    assert norm > 1e-3 and len(set(rewards)) > 2 and len({len(r.token_ids) for r in rollouts}) > 2
    assert (abs(loss.item()) < 1e-6) == (experiment.algo.name == "grpo")  # whose row means are the advantages, sum 0
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_the_noise_is_in_the_sampler_and_not_in_the_trainer(sampled: Step) -> None:
    """The rollouts carry log-probabilities of the noisy policy: found again with the noise in alone."""
    rollouts = _step_rollouts(sampled)
    fresh = sampled.fresh_policy()
    batch = make_batch(
        [r.prompt_ids for r in rollouts],
        [r.token_ids for r in rollouts],
        fresh.pad_id,
        fresh.device,
        [r.logprobs for r in rollouts],
    )
    with torch.no_grad():
        clean = fresh.token_stats(batch.input_ids, batch.mask, 0.8).logprobs
        with fresh.noise.for_rollout(3, 0):
            noisy = fresh.token_stats(batch.input_ids, batch.mask, 0.8).logprobs
    assert (noisy - batch.sampler_logprobs).abs().max() < 1e-5
    assert (clean - batch.sampler_logprobs).abs().mean() == pytest.approx(
        sampled.found["mismatch/logp_abs_mean"] * float(batch.mask.double().mean()), rel=1e-2
    )
    assert sampled.found["mismatch/kl"] > 1e-4


def test_the_step_kept_its_first_group_with_rewards_and_the_numbers_of_each_token(sampled: Step) -> None:
    lines = [json.loads(line) for line in (sampled.run.path / "rollouts.jsonl").read_text().splitlines()]
    rollouts = {(r.prompt.id, r.text, tuple(r.logprobs)): r for r in _step_rollouts(sampled)}
    assert len(lines) == 4 and len({line["prompt"] for line in lines}) == 1
    kept = [r for r in rollouts.values() if r.prompt.id == lines[0]["prompt"]]
    fresh = sampled.fresh_policy()
    batch = make_batch([r.prompt_ids for r in kept], [r.token_ids for r in kept], fresh.pad_id, fresh.device)
    with torch.no_grad():
        trained = fresh.token_stats(batch.input_ids, batch.mask, 0.8).logprobs
        with fresh.noise.for_rollout(3, 0):
            noisy = fresh.token_stats(batch.input_ids, batch.mask, 0.8).logprobs
    for row, (line, rollout) in enumerate(zip(lines, kept, strict=True)):
        judged = sampled.experiment.task.reward(rollout.prompt, rollout.text)
        expected = {"step": 3, "completion": rollout.text, "gold": rollout.prompt.answer, "reward": judged.total}
        expected |= {**judged.parts, "correct": judged.correct, "finished": rollout.finished}
        assert {key: line[key] for key in expected} == expected
        assert len(line["tokens"]) == len(rollout.token_ids)
        mask = batch.mask[row]
        numbers = {"sampled": rollout.logprobs, "entropy": rollout.entropies}
        numbers |= {"trained": trained[row][mask].tolist(), "noisy": noisy[row][mask].tolist()}
        for name, nats in numbers.items():
            assert line[name] == pytest.approx([1000 * number for number in nats], abs=0.51 + 0.02), name
    assert any(line["trained"] != line["noisy"] for line in lines)
    assert sum(line["advantage"] for line in lines) == pytest.approx(0, abs=1e-3)
