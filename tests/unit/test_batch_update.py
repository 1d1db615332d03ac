"""The tensors of a step, and the step itself: whatever the micro-batches, one gradient, one AdamW update."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from qerl_bench.config import build, compose
from qerl_bench.train.batch import Batch, demonstration_batch, make_batch
from qerl_bench.train.update import make_optimizer, update
from qerl_core.checks import ConfigError
from qerl_core.options.fingerprint import as_dict, fingerprint
from qerl_core.records import Demonstration
from qerl_core.rundir.finished_run import with_later_keys

CPU = torch.device("cpu")
NAMES = ["grpo", "dapo", "bnpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp", "sft"]
ALGORITHMS = pytest.mark.parametrize("algo", NAMES)


# --- batches ---------------------------------------------------------------------------------------------------------


def test_a_batch_by_hand() -> None:
    batch = make_batch(
        [[1, 2], [3], [4, 5, 6]],
        [[7], [8, 9, 10], []],
        0,
        CPU,
        [[-0.5], [-1.0, -2.0, -3.0], []],
        torch.tensor([1, -1, 0]),
    )
    assert batch.input_ids.tolist() == [[1, 2, 7, 0], [3, 8, 9, 10], [4, 5, 6, 0]]
    assert batch.mask.int().tolist() == [[0, 0, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0]]
    assert batch.sampler_logprobs.tolist() == [[0, 0, -0.5, 0], [0, -1, -2, -3], [0, 0, 0, 0]]
    assert batch.advantages.tolist() == [1, -1, 0]
    assert batch.lengths.tolist() == [3, 4, 3]
    assert batch.input_ids.dtype == torch.long and batch.mask.dtype == torch.bool
    assert batch.sampler_logprobs.dtype == batch.advantages.dtype == torch.float32


def test_demonstrations_have_no_sampler_and_no_advantage() -> None:
    batch = make_batch([[1, 2]], [[3]], 0, CPU)
    assert batch.sampler_logprobs.tolist() == [[0, 0, 0]] and batch.advantages.tolist() == [0]


class Listener:
    """In place of a policy: keeps what it should imitate."""

    pad_id = 0
    model = SimpleNamespace(config=LlamaConfig())

    def __init__(self) -> None:
        self.heard: list[Demonstration] = []

    def demonstration_ids(self, demonstrations: list[Demonstration]) -> tuple[list[list[int]], list[list[int]]]:
        self.heard = demonstrations
        return [[1] for _ in demonstrations], [[2] for _ in demonstrations]


def _demonstrations(words: list[str], policy: Any) -> Batch:
    experiment = build(compose(words))
    return demonstration_batch(experiment.task, experiment, policy, 3)


def test_only_demonstrations_that_reach_their_target_are_imitated_if_asked() -> None:
    heard = {}
    for right_only in (False, True):
        words = ["experiment=worlds/base", "algo=sft", "rollout.prompts_per_step=64", f"algo.right_only={right_only}"]
        policy: Any = Listener()
        assert len(_demonstrations(words, policy).lengths) == len(policy.heard)
        heard[right_only] = policy.heard
    reached = [one for one in heard[False] if one.completion.split()[-2] == one.prompt.question.split()[-2]]
    assert len(heard[False]) == 64 and 10 < len(reached) < 54 and heard[True] == reached
    words = ["experiment=worlds/base", "algo=sft", "algo.right_only=true", "rollout.prompts_per_step=4", "task.hit=0"]
    with pytest.raises(ConfigError, match=r"algo.right_only=true leaves none of the 4 .* step 3 of task=countdown"):
        _demonstrations(words, policy)


def test_runs_from_before_the_choice_of_demonstrations_keep_their_names() -> None:
    now = as_dict(compose(["algo=sft"]))
    before = now | {"algo": {key: value for key, value in now["algo"].items() if key != "right_only"}}
    assert (
        fingerprint(before) == fingerprint(now) != fingerprint(as_dict(compose(["algo=sft", "algo.right_only=true"])))
    )
    assert with_later_keys(before)["algo"] == now["algo"]
    assert "right_only" not in with_later_keys(as_dict(compose()))["algo"]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=9),
    tokens=st.integers(1, 40),
    left_out=st.sets(st.integers(0, 8)),
)
def test_micro_batches_hold_every_sequence_once_and_no_column_too_many(
    lengths: list[tuple[int, int]], tokens: int, left_out: set[int]
) -> None:
    prompts = [[100 * row + i for i in range(p)] for row, (p, _) in enumerate(lengths)]
    completions = [[100 * row + 50 + i for i in range(c)] for row, (_, c) in enumerate(lengths)]
    logprobs = [[-float(token) - 1 for token in completion] for completion in completions]
    batch = make_batch(prompts, completions, -7, CPU, logprobs, torch.arange(len(lengths)))
    selected = torch.tensor([row not in left_out for row in range(len(lengths))])
    micro = [batch.rows(rows) for rows in batch.micro_batches(tokens, selected)]
    for part, following in pairwise(micro):  # no larger than allowed, and the next row would not have fitted
        assert len(part.lengths) == 1 or part.input_ids.numel() <= tokens
        assert part.input_ids.numel() + part.input_ids.shape[1] > tokens
        assert int(part.lengths.min()) >= int(following.lengths.max())
    seen = []
    for part in micro:
        assert part.input_ids.shape == part.mask.shape == part.sampler_logprobs.shape
        assert part.input_ids.shape[1] == part.lengths.max()
        for row in range(len(part.lengths)):
            index, length = int(part.advantages[row]), int(part.lengths[row])
            seen.append(index)
            assert part.input_ids[row, :length].tolist() == prompts[index] + completions[index]
            assert (part.input_ids[row, length:] == -7).all()
            assert part.input_ids[row][part.mask[row]].tolist() == completions[index]
            assert part.sampler_logprobs[row][part.mask[row]].tolist() == logprobs[index]
            assert (part.sampler_logprobs[row][~part.mask[row]] == 0).all()
    assert sorted(seen) == [row for row in range(len(lengths)) if row not in left_out]
    widths = [part.input_ids.shape[1] for part in micro]
    assert widths == sorted(widths, reverse=True)  # a step that runs out of memory does so at once


# --- updates ---------------------------------------------------------------------------------------------------------


def _batch(policy: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    prompts, completions, logprobs = [], [], []
    for length in (4, 1, 9, 0, 6, 3, 12):
        prompts.append(
            torch.randint(0, 256, (int(torch.randint(1, 9, (), generator=generator)),), generator=generator).tolist()
        )
        completions.append(torch.randint(0, 256, (length,), generator=generator).tolist())
        logprobs.append([-5.0] * length)
    advantages = torch.tensor([1.0, -0.5, 0.25, 2.0, -1.5, 0.0, 0.75])
    return make_batch(prompts, completions, policy.pad_id, policy.device, logprobs, advantages)


@pytest.fixture(scope="module")
def adapted(make_policy: Callable[..., Any]) -> Callable[[], Any]:
    """adapted(): a policy with the weights that it was built with, whatever an update made of them since."""
    policy = make_policy(adapted=True)
    built = [parameter.detach().clone() for parameter in policy.trainable]

    def restored() -> Any:
        with torch.no_grad():
            for parameter, weights in zip(policy.trainable, built, strict=True):
                parameter.copy_(weights)
        return policy

    return restored


def _state(policy: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().double() for parameter in policy.trainable])


def _experiment(make_experiment: Callable[..., Any], algo: str, *words: str, **optim: Any) -> Any:
    """Four steps with an algorithm; `optim` changes options of the optimizer."""
    return make_experiment("quant=nvfp4", f"algo={algo}", *words, *(f"optim.{key}={optim[key]}" for key in optim))


def _update(experiment: Any, policy: Any, optimizer: Any, batch: Any, step: int = 1) -> dict[str, float]:
    no_run: Any = None  # a run directory is needed only if something is not finite
    return update(experiment, policy, optimizer, batch, no_run, step)


# An entry of the gradient sums over the tokens, and each split adds them in another order. Errors of such sums grow as
# the root of their number, 8 for the some 60 tokens here, in FP32 roundings of the largest entry. On one CPU, at most
# 4.2 were seen with all its instructions and 2.8 with those of SSE 4.2.
ROUNDINGS = 8


@ALGORITHMS
def test_the_split_into_micro_batches_changes_memory_and_nothing_else(
    adapted: Callable[[], Any], make_experiment: Callable[..., Any], algo: str
) -> None:
    results, passes = [], []
    for tokens in (1000, 21, 30, 60):
        policy = adapted()
        experiment = _experiment(make_experiment, algo, f"train.micro_batch_tokens={tokens}")
        # SGD would do, but AdamW's first step is the sign of the gradient: compare the gradient through its momentum.
        optimizer = make_optimizer(policy, experiment.optim)
        found = _update(experiment, policy, optimizer, _batch(policy))
        passes.append(found.pop("train/micro_batches"))
        moments = torch.cat(
            [optimizer.state[parameter]["exp_avg"].flatten().double() for parameter in policy.trainable]
        )
        results.append((found, moments))
    first, moments = results[0]
    assert moments.abs().max() > 1e-4 and len(set(passes)) == 4
    for found, other in results[1:]:
        assert found == pytest.approx(first, rel=1e-5, abs=1e-6)
        limit = ROUNDINGS * torch.finfo(torch.float32).eps * float(moments.abs().max())
        assert torch.allclose(other, moments, rtol=0, atol=limit)


@pytest.mark.parametrize("beta2", [0.99, 0.9])
def test_one_update_is_clipped_adamw(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], beta2: float
) -> None:
    """Three steps of AdamW (0.9, beta2), clipped to the global norm, written out; each on rows of its own."""
    policy, fresh = make_policy(adapted=True), make_policy(adapted=True)
    clipped = {
        "beta2": beta2,
        "max_grad_norm": 0.01,
        "weight_decay": 0.1,
        "lr": 0.02,
        "schedule": "linear",
        "warmup_steps": 1,
    }
    experiment = _experiment(make_experiment, "sft", **clipped)
    optimizer = make_optimizer(policy, experiment.optim)
    names = [name for name, parameter in fresh.model.named_parameters() if parameter.requires_grad]
    mean, square = (dict.fromkeys(names, torch.zeros(())) for _ in range(2))
    for step, lr in ((1, 0.02 * 0.5), (2, 0.02 * (1 - 1 / 4)), (3, 0.02 * (1 - 2 / 4))):
        batch = _batch(fresh).rows(torch.tensor([[0, 1, 2], [4, 6], [5]][step - 1]))
        found = _update(experiment, policy, optimizer, batch, step)
        assert found["lr"] == pytest.approx(lr, rel=1e-12)

        logprobs = fresh.token_stats(batch.input_ids, batch.mask, 1.0).logprobs
        loss = -logprobs.sum() / int(batch.mask.sum())
        gradients = dict(zip(names, torch.autograd.grad(loss, fresh.trainable), strict=True))
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert found["grad_norm"] == pytest.approx(norm, rel=1e-4) and norm > 0.01
        with torch.no_grad():
            for name, parameter in fresh.model.named_parameters():
                if name not in gradients:
                    continue
                gradient = gradients[name] * (0.01 / norm)
                mean[name] = 0.9 * mean[name] + 0.1 * gradient
                square[name] = beta2 * square[name] + (1 - beta2) * gradient**2
                scaled = (mean[name] / (1 - 0.9**step)) / ((square[name] / (1 - beta2**step)).sqrt() + 1e-8)
                parameter.copy_(parameter * (1 - lr * 0.1) - lr * scaled)
    gap = (_state(policy) - _state(fresh)).abs()
    assert gap.quantile(0.99) < 1e-5 and gap.max() < 1e-3  # where a gradient is all rounding, so is its scaled step
    assert (_state(policy) - _state(make_policy(adapted=True))).abs().median() > 5e-3


def test_gradients_do_not_pile_up_and_dropout_ends(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any]
) -> None:
    policy = make_policy(adapted=True)
    experiment = _experiment(make_experiment, "sft", lr=1e-12)
    optimizer = make_optimizer(policy, experiment.optim)
    found = [_update(experiment, policy, optimizer, _batch(policy), step) for step in (1, 2)]
    assert found[0]["grad_norm"] == pytest.approx(found[1]["grad_norm"], rel=1e-3)
    assert all(parameter.grad is None for parameter in policy.trainable)
    assert not policy.model.training


def test_a_step_without_signal_moves_nothing(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any]
) -> None:
    """Every advantage 0: no gradient, and no weight decay by default."""
    policy = make_policy(adapted=True)
    before = _state(policy)
    experiment = _experiment(make_experiment, "grpo")
    batch = dataclasses.replace(_batch(policy), advantages=torch.zeros(7))
    found = _update(experiment, policy, make_optimizer(policy, experiment.optim), batch)
    assert found["loss"] == 0 and found["grad_norm"] == 0
    assert torch.equal(_state(policy), before)


@pytest.mark.parametrize(
    ("algo", "words", "advantages"),
    [
        ("grpo", (), (1.0, -0.5, 0.25, 2.0, -1.5, 0.0, 0.75)),
        ("grpo", ("train.updates_per_batch=3",), (1.0, 0.0, 0.0, 2.0, -1.5, 0.0, 0.0)),
        ("grpo", (), (0.0,) * 7),
        ("dapo", (), (0.0, 0.0, 1e-6, 0.0, 0.0, 0.0, 0.0)),
        ("grpo", ("train.entropy_coef=0.1",), (0.0,) * 7),
        ("grpo", ("kl.coef=0.1",), (0.0,) * 7),
        ("sft", (), (0.0,) * 7),
    ],
)
def test_the_taught_share_is_that_of_tokens_whose_loss_has_a_gradient(
    adapted: Callable[[], Any],
    make_experiment: Callable[..., Any],
    algo: str,
    words: tuple[str, ...],
    advantages: tuple[float, ...],
) -> None:
    """Against the gradient of each completion alone. The adapter is not zero, or the divergence of kl would be."""
    lengths = (4, 1, 9, 0, 6, 3, 12)
    policy = adapted()
    experiment = _experiment(make_experiment, algo, *words)
    batch = dataclasses.replace(_batch(policy), advantages=torch.tensor(advantages))
    moved = []
    for row, length in enumerate(lengths):
        if length == 0:
            continue
        optimizer = make_optimizer(adapted(), experiment.optim)
        alone = _update(experiment, policy, optimizer, batch.rows(torch.tensor([row])))
        moved.append(alone["grad_norm"] > 0)
        assert alone["train/taught_frac"] == float(moved[-1])
    tokens = [length for length in lengths if length]
    wanted = sum(length for length, taught in zip(tokens, moved, strict=True) if taught) / sum(tokens)
    found = _update(experiment, adapted(), make_optimizer(policy, experiment.optim), batch)
    assert found["train/taught_frac"] == pytest.approx(wanted, abs=1e-12)


@ALGORITHMS
def test_an_update_goes_the_right_way(
    adapted: Callable[[], Any], make_experiment: Callable[..., Any], algo: str
) -> None:
    """Completions with a positive advantage become likelier, those with a negative one less likely; SFT raises all."""
    policy = adapted()
    batch = _batch(policy)
    experiment = _experiment(make_experiment, algo, lr=1e-3)

    def logprobs() -> torch.Tensor:
        with torch.no_grad():
            return policy.token_stats(batch.input_ids, batch.mask, 1.0).logprobs.sum(1)

    before = logprobs()
    _update(experiment, policy, make_optimizer(policy, experiment.optim), batch)
    change = logprobs() - before
    wanted = torch.ones(7) if algo == "sft" else batch.advantages
    assert (change * wanted).sum() > 0
    longest, negative = 6, 4
    assert change[longest] > 0 and (change[negative] > 0) == (algo == "sft")


def test_metrics_of_an_update_are_those_before_it(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any]
) -> None:
    policy = make_policy(adapted=True)
    batch = _batch(policy)
    experiment = _experiment(make_experiment, "grpo", "rollout.temperature=0.7", "train.micro_batch_tokens=50", lr=0.1)
    with torch.no_grad():
        stats = policy.token_stats(batch.input_ids, batch.mask, 0.7)
    found = _update(experiment, policy, make_optimizer(policy, experiment.optim), batch)
    assert found["entropy_clean"] == pytest.approx(stats.entropy[batch.mask].double().mean().item(), rel=1e-5)
    assert found["entropy_t1"] == pytest.approx(stats.entropy_t1[batch.mask].double().mean().item(), rel=1e-5)
    gaps = (stats.logprobs - batch.sampler_logprobs)[batch.mask]
    assert found["mismatch/logp_abs_max"] == pytest.approx(gaps.abs().max().item(), rel=1e-4)


def test_a_supervised_update_says_nothing_about_a_sampler(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any]
) -> None:
    policy = make_policy()
    experiment = _experiment(make_experiment, "sft")
    found = _update(experiment, policy, make_optimizer(policy, experiment.optim), _batch(policy))
    others = {"loss", "grad_norm", "lr", "updates_skipped", "entropy_clean", "entropy_t1"}
    assert set(found) == {"train/taught_frac", "train/micro_batches", *others}
