"""Training passes of fixed shapes compute what the plain ones compute; a GPU replays them from graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qerl_bench.train import recorded_passes
from qerl_bench.train import update as module
from qerl_bench.train.batch import make_batch
from qerl_bench.train.recorded_passes import PaddedInputs, bucket, why_not
from qerl_bench.train.trainer_state import TrainerState
from qerl_core.checks import ConfigError

LENGTHS = (4, 1, 9, 0, 6, 3, 12)
NO_RUN: Any = None


def test_buckets_are_at_most_a_quarter_too_large() -> None:
    assert [bucket(n) for n in (1, 4, 5, 8, 9, 11, 17, 4096)] == [4, 4, 5, 8, 10, 12, 20, 4096]
    assert all(n <= bucket(n) < 1.25 * n + 3 for n in range(1, 3000))
    assert len({bucket(n) for n in range(1, 4097)}) < 50


def _batch(device: str = "cpu") -> Any:
    generator = torch.Generator().manual_seed(0)
    rows = [
        [torch.randint(0, 256, (n,), generator=generator).tolist() for n in sizes]
        for sizes in ((2, 3, 1, 5, 8, 4, 2), LENGTHS)
    ]
    logprobs = [[-5.0] * length for length in LENGTHS]
    advantages = torch.tensor([1.0, -0.5, 0.25, 2.0, -1.5, 0.0, 0.75])
    return make_batch(*rows, 0, torch.device(device), logprobs, advantages)


def test_what_is_added_has_no_weight() -> None:
    batch = _batch()
    inputs = PaddedInputs.of(batch, torch.ones(7), 9)
    assert inputs.shape == (7, 14, 40) and (inputs.rows, inputs.width) == (7, 14)
    wide = PaddedInputs.of(batch.rows(torch.tensor([2, 4, 6])), torch.ones(3), 9)
    assert wide.shape == (4, 14, 28) and wide.tensors["loss_weights"].tolist() == [1, 1, 1, 0]
    for found in (inputs, wide):
        scored, count = found.tensors["scored"], int(found.tensors["mask"].sum())
        chosen = found.tensors["mask"].flatten()[scored]
        assert chosen[:count].all() and not chosen[count:].any()
        assert len(scored.unique()) == len(scored) and (scored % found.shape[1] > 0).all()
    narrow = PaddedInputs.of(batch.rows(torch.tensor([0, 1])), torch.ones(2), 9).tensors["input_ids"]
    assert narrow.shape == (4, 6) and (narrow[2:] == 9).all() and (narrow[:2] == batch.input_ids[:2, :6]).all()


def _step(policy: Any, experiment: Any, batch: Any, fixed: bool) -> tuple[dict[str, float], Any]:
    """Metrics of one update, and the gradient by AdamW's first moment; `fixed` is without a graph on a CPU."""
    passes = recorded_passes.RecordedPasses(experiment, policy) if fixed else None
    optimizer, state = module.make_optimizer(policy, experiment.optim), TrainerState(passes=passes)
    found = module.update(experiment, policy, optimizer, batch, NO_RUN, 1, state=state)
    moments = [
        optimizer.state[p]["exp_avg"].flatten() if p in optimizer.state else p.flatten() * 0 for p in policy.trainable
    ]
    return found, torch.cat(moments).detach().cpu()


CASES = [
    ("sft", ("lora=none", "quant=bf16")),
    ("grpo", ("quant=nvfp4", "train.entropy_coef=0.1")),
    ("gspo", ("quant=nvfp4", "aqn=constant", "aqn.level=0.1")),
    ("dapo", ("quant=nvfp4", "rollout.temperature=0.7")),
]


@pytest.mark.parametrize(("algo", "words"), CASES)
def test_fixed_shapes_change_rounding_only(
    make_policy: Callable[..., Any],
    make_experiment: Callable[..., Any],
    algo: str,
    words: tuple[str, ...],
) -> None:
    words = (f"algo={algo}", *words, "train.micro_batch_tokens=40", "train.mismatch_share=1")
    experiment, results = make_experiment(*words), []
    for fixed in (False, True):
        quant = next(word.partition("=")[2] for word in words if word.startswith("quant="))
        policy = make_policy(
            *(word for word in words if "quant" not in word), quant=quant, adapted="lora=none" not in words
        )
        if experiment.aqn.name != "none":
            with policy.noise.for_rollout(1, 0):
                pass
        results.append(_step(policy, experiment, _batch(), fixed))
    (plain, gradient), (padded, other) = results
    for found in (plain, padded):
        found.pop("train/micro_batches")  # rows without gradient have none of their own
    assert padded == pytest.approx(plain, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(other, gradient, rtol=0, atol=1e-6 * float(gradient.abs().max()) + 1e-9)
    assert gradient.abs().max() > 1e-4


@pytest.mark.parametrize("fixed", [False, True])
def test_autocast_computes_the_gradient_to_the_rounding_of_bf16(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], fixed: bool
) -> None:
    """Weights and gradients stay in FP32; the gradient differs by what BF16 rounds (2^-9), and it does differ."""
    words, results = ("algo=sft", "lora=none", "quant=bf16"), []
    for autocast in (False, True):
        policy = make_policy("algo=sft", "lora=none", quant="bf16", adapted=False)
        experiment = make_experiment(*words, f"train.autocast={autocast}")
        results.append(_step(policy, experiment, _batch(), fixed))
        assert {parameter.dtype for parameter in policy.trainable} == {torch.float32}
    (plain, gradient), (rounded, other) = results
    assert rounded["loss"] == pytest.approx(plain["loss"], rel=1e-2)
    off = float((other - gradient).norm() / gradient.norm())
    assert 1e-4 < off < 0.05 and other.dtype == torch.float32


def test_autocast_is_for_weights_that_are_trained(make_experiment: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"beside an adapter none are\. Use train.autocast=false, or lora=none"):
        make_experiment("train.autocast=true")
    with pytest.raises(ConfigError, match=r"beside an adapter none are\. Use engine.tf32=false, or lora=none"):
        make_experiment("engine.tf32=true")


def test_where_it_cannot_be_the_log_says_why(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="qerl_bench")
    policy = make_policy()
    for words, reason in (((), "no GPU"), (("train.capture=off",), "capture=off")):
        assert reason in str(why_not(make_experiment(*words), policy))
    assert (
        recorded_passes.recorded_passes(make_experiment(), policy) is None
        and "not recorded: there is no GPU" in caplog.text
    )
    seen = {"device": torch.device("cuda"), "model": policy.model, "packing": True, "experts": []}
    seen |= {"rounding": None, "merging": None, "kv": policy.kv, "is_sharded": False}
    on_gpu: Any = type("OnGpu", (), seen)()
    refused = {
        "train.recompute=full": "recompute=full",
        "train.updates_per_batch=2": "updates_per_batch=2",
        "kl.coef=0.1": "kl.coef",
        "lora.dropout=0.1": "dropout",
        "importance_sampling.mode=truncate": "mode=truncate",
        "noise.site=rollout_and_training": "site=rollout_and_training",
    }
    for word, reason in refused.items():
        assert reason in str(why_not(make_experiment(word), on_gpu))
    assert why_not(make_experiment(), on_gpu) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("algo", "words"), CASES)
def test_a_replayed_pass_is_the_plain_one(
    make_policy: Callable[..., Any],
    make_experiment: Callable[..., Any],
    algo: str,
    words: tuple[str, ...],
) -> None:
    """Two updates, so that the second replays: on other weights, and with the rows in another order."""
    words = (f"algo={algo}", *words, "train.micro_batch_tokens=1000", "train.mismatch_share=1", "kernel=torch")
    experiment, results = make_experiment(*words), []
    quant = next(word.partition("=")[2] for word in words if word.startswith("quant="))
    for fixed in (False, True):
        policy = make_policy(
            *(word for word in words if "quant" not in word),
            quant=quant,
            adapted="lora=none" not in words,
            device="cuda",
        )
        if experiment.aqn.name != "none":
            with policy.noise.for_rollout(1, 0):
                pass
        passes = recorded_passes.RecordedPasses(experiment, policy) if fixed else None
        optimizer, kept = module.make_optimizer(policy, experiment.optim), TrainerState(passes=passes)
        batch = _batch()
        found = [
            module.update(experiment, policy, optimizer, batch.rows(rows), NO_RUN, step, state=kept)
            for step, rows in ((1, torch.arange(7)), (2, torch.arange(6, -1, -1)))
        ]
        assert passes is None or len(passes.recordings.passes) == 1
        state = torch.cat([p.detach().flatten().cpu() for p in policy.trainable])
        results.append((found, state))
    (plain, state), (replayed, other) = results
    for one, two in zip(plain, replayed, strict=True):
        for found in (one, two):
            found.pop("train/micro_batches")
        assert two == pytest.approx(one, rel=1e-4, abs=1e-5)
    assert (state - other).abs().quantile(0.99) < 1e-5
