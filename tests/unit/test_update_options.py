"""Options of the step: several updates, KL penalty, rows without signal, 8-bit AdamW, trained norms, NaN."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qerl_bench.algo.base import LossInputs
from qerl_bench.algo.loss import step_loss
from qerl_bench.config import build, compose
from qerl_bench.model_setup import build_policy
from qerl_bench.train.batch import make_batch
from qerl_bench.train.nonfinite import NonFiniteError, dump
from qerl_bench.train.update import make_optimizer, update
from qerl_core.checks import ConfigError, TrainingStopped

Maker = Callable[..., Any]
NO_RUN: Any = None  # a run directory is needed only if something is not finite


def _batch(policy: Any, advantages: tuple[float, ...] = (1.0, -0.5, 0.0, 2.0, -1.5, 0.0)) -> Any:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 256, (2 + i,), generator=generator).tolist() for i in range(6)]
    completions = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (4, 1, 9, 6, 3, 12)]
    logprobs = [[-5.0] * len(completion) for completion in completions]
    return make_batch(prompts, completions, policy.pad_id, policy.device, logprobs, torch.tensor(advantages))


def _state(policy: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in policy.trainable]


# --- several updates on one batch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["grpo", "gspo", "cispo", "rloo"])
@pytest.mark.parametrize("coef", [0.0, 0.3])
def test_three_updates_are_three_steps_against_the_same_old_policy(
    make_policy: Maker, make_experiment: Maker, algo: str, coef: float
) -> None:
    words = (
        "train.updates_per_batch=3",
        "train.micro_batch_tokens=24",
        "optim.lr=3e-3",
        f"kl.coef={coef}",
        f"algo={algo}",
    )
    experiment = make_experiment("quant=nvfp4", *words)
    policy, fresh = (make_policy(*words, sharp=True, adapted=True) for _ in range(2))
    batch = _batch(fresh)
    found = update(experiment, policy, make_optimizer(policy, experiment.optim), batch, NO_RUN, 1)

    optimizer = make_optimizer(fresh, experiment.optim)
    weights = experiment.algo.loss_weights(batch.mask.sum(1))
    with torch.no_grad():
        old = fresh.token_stats(batch.input_ids, batch.mask, 1.0).logprobs
        with fresh.without_adapter():
            reference = fresh.token_stats(batch.input_ids, batch.mask, 1.0).logprobs
    assert (old - reference).abs().max() > 0.05
    losses, norms, sums = [], [], dict.fromkeys(("clip_ratio/low_mean", "clip_ratio/high_mean", "kl"), 0.0)
    for _ in range(3):
        terms = LossInputs(
            logprobs=fresh.token_stats(batch.input_ids, batch.mask, 1.0).logprobs,
            old_logprobs=old,
            advantages=batch.advantages,
            mask=batch.mask,
            reference_logprobs=reference if coef else None,
        )
        loss, columns = step_loss(experiment.algo, experiment.kl, terms, weights)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(fresh.trainable, experiment.optim.max_grad_norm)))
        optimizer.step()
        losses.append(loss.item())
        for name, column in columns.items():
            sums[name] += column[batch.mask].double().mean().item() / 3
    assert found["loss"] == pytest.approx(sum(losses) / 3, rel=1e-3, abs=1e-5)
    assert found["grad_norm"] == pytest.approx(sum(norms) / 3, rel=1e-2)
    assert found["clip_ratio/low_mean"] == pytest.approx(sums["clip_ratio/low_mean"], abs=1e-6)
    assert found["clip_ratio/high_mean"] == pytest.approx(sums["clip_ratio/high_mean"], abs=1e-6)
    assert ("kl" in found) == (coef > 0)
    if coef > 0:
        assert found["kl"] == pytest.approx(sums["kl"], rel=1e-3) and found["kl"] > 1e-3
    if algo in ("grpo", "gspo"):
        assert (
            found["clip_ratio/low_mean"] + found["clip_ratio/high_mean"] > 0
        )  # later updates do leave the first policy
    for one, other in zip(_state(policy), _state(fresh), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=3e-4)
    moved = max(
        float((a - b).abs().max()) for a, b in zip(_state(policy), _state(make_policy(adapted=True)), strict=True)
    )
    assert moved > 2 * 3e-3 * 0.9


def test_the_first_update_is_on_policy_to_the_bit(make_policy: Maker, make_experiment: Maker) -> None:
    """With one update, not one token is clipped, however narrow the clip."""
    experiment = make_experiment("quant=nvfp4", "algo=gspo", "algo.epsilon_low=1e-9", "algo.epsilon_high=1e-9")
    policy = make_policy(adapted=True)
    found = update(experiment, policy, make_optimizer(policy, experiment.optim), _batch(policy), NO_RUN, 1)
    assert found["clip_ratio/low_mean"] == found["clip_ratio/high_mean"] == 0


# --- completions without signal --------------------------------------------------------------------------------------


def test_rows_without_advantage_are_left_out_of_the_backward_pass_and_nothing_else(
    make_policy: Maker, make_experiment: Maker
) -> None:
    experiment = make_experiment("quant=nvfp4", "algo=grpo", "optim.max_grad_norm=1e9")
    policy = make_policy(adapted=True)
    batch, seen, plain = _batch(policy), [], policy.token_stats

    def watched(input_ids: torch.Tensor, *rest: Any) -> Any:
        seen.append((torch.is_grad_enabled(), len(input_ids)))
        return plain(input_ids, *rest)

    weights = experiment.algo.loss_weights(batch.mask.sum(1))  # over all six, the two without advantage included
    logprobs = plain(batch.input_ids, batch.mask, 1.0).logprobs
    loss = -(
        weights[:, None].float() * batch.advantages[:, None] * torch.exp(logprobs - logprobs.detach()) * batch.mask
    ).sum()
    expected = torch.autograd.grad(loss, policy.trainable)
    policy.token_stats = watched
    optimizer = make_optimizer(policy, experiment.optim)
    found = update(experiment, policy, optimizer, batch, NO_RUN, 1)
    assert seen == [(True, 4), (False, 2)]
    for parameter, gradient in zip(policy.trainable, expected, strict=True):
        first_moment = optimizer.state[parameter]["exp_avg"] / 0.1
        assert torch.allclose(first_moment, gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()) + 1e-9)
    assert found["loss"] == pytest.approx(loss.item(), abs=1e-6)


@pytest.mark.parametrize("words", [("algo=grpo", "kl.coef=0.1"), ("algo=sft",)], ids=["kl", "sft"])
def test_every_row_is_trained_on_where_advantages_are_not_all_that_counts(
    make_policy: Maker, make_experiment: Maker, words: tuple[str, ...]
) -> None:
    experiment = make_experiment("quant=nvfp4", *words)
    policy = make_policy(adapted=True)
    batch = _batch(policy, (0.0,) * 6)
    found = update(experiment, policy, make_optimizer(policy, experiment.optim), batch, NO_RUN, 1)
    assert found["grad_norm"] > 1e-3


# --- optimiser and trainable parts -----------------------------------------------------------------------------------


def test_adamw_8bit_keeps_its_states_in_bytes_and_continues_from_a_checkpoint(
    make_policy: Maker, make_experiment: Maker, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    words = ("optim.optimizer=adamw_8bit", "model.hidden_size=128", "lora.rank=32")
    experiment = make_experiment("quant=nvfp4", "algo=sft", *words)
    make: Callable[[], Any] = lambda: build_policy(experiment, None, "cpu")  # noqa: E731
    straight = make()
    optimizer = make_optimizer(straight, experiment.optim)
    first = update(experiment, straight, optimizer, _batch(straight), NO_RUN, 1)
    states = [optimizer.state[parameter] for parameter in straight.trainable if parameter.numel() >= 4096]
    assert states and all(state["state1"].dtype == state["state2"].dtype == torch.uint8 for state in states)

    straight.save(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    second = update(experiment, straight, optimizer, _batch(straight), NO_RUN, 2)
    resumed = make()
    resumed.load(tmp_path)
    again = make_optimizer(resumed, experiment.optim)
    again.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert update(experiment, resumed, again, _batch(resumed), NO_RUN, 2) == second
    assert second["loss"] < first["loss"]
    assert all(torch.equal(a, b) for a, b in zip(_state(straight), _state(resumed), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trained_norms_learn_are_saved_and_stay_out_of_the_base(
    make_experiment: Maker, make_noise: Any, tmp_path: Path, dtype: str
) -> None:
    words = ("lora.train_norms=true", f"model.dtype={dtype}", "algo=sft", "optim.lr=1e-3")
    experiment = make_experiment("quant=nvfp4", *words)
    policy = build_policy(experiment, None, "cpu")
    batch = _batch(policy)
    scales = [norm.weight for norm in policy.norms.values()]
    assert len(scales) == 4 and all(scale.dtype == torch.float32 for scale in scales)
    assert {id(scale) for scale in scales} <= {id(parameter) for parameter in policy.trainable}

    def logprobs() -> torch.Tensor:
        with torch.no_grad():
            return policy.token_stats(batch.input_ids, batch.mask, 1.0).logprobs

    with policy.without_adapter():
        base = logprobs()
    optimizer = make_optimizer(policy, experiment.optim)
    for step in (1, 2):
        update(experiment, policy, optimizer, batch, NO_RUN, step)
    assert all(scale is norm.weight for scale, norm in zip(scales, policy.norms.values(), strict=True))
    assert all(0 < float((scale.detach() - 1).abs().max()) < 0.01 for scale in scales)  # steps that BF16 would lose
    with policy.without_adapter():
        assert torch.equal(logprobs(), base)
    with make_noise(policy.norms, 0.05).for_rollout(1, 0):
        assert not torch.equal(logprobs(), base)
    assert all(scale is norm.weight for scale, norm in zip(scales, policy.norms.values(), strict=True))

    trained = logprobs()
    policy.save(tmp_path)
    assert set(load_file(tmp_path / "norms.safetensors")) == {f"{name}.weight" for name in policy.norms}
    other = build_policy(experiment, None, "cpu")
    other.load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(_state(policy), _state(other), strict=True))
    with torch.no_grad():
        assert torch.equal(other.token_stats(batch.input_ids, batch.mask, 1.0).logprobs, trained)


def test_norms_are_frozen_unless_asked_for(make_policy: Maker) -> None:
    policy = make_policy("lora.train_norms=false")
    assert not any(norm.weight.requires_grad for norm in policy.norms.values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lora=none", "model.dtype=bfloat16"], "model.dtype=float32"),
        (["lora=none", "kl.coef=0.1"], "kl.coef"),
        (["algo=sft", "kl.coef=0.1"], "on-policy"),
        (["train.updates_per_batch=2", "lora.dropout=0.1"], "lora.dropout=0"),
        (["train.updates_per_batch=0"], "train.updates_per_batch"),
        (["optim.optimizer=lion"], "adamw"),
        (["train.on_nonfinite=ignore"], "train.on_nonfinite .*stop.*skip"),
        (["train.packing=1"], "train.packing"),
        (["lora.train_norms=2"], "lora.train_norms"),
        (["kl.estimator=k5"], "k1, k2, k3"),
        (["algo=dapo", "algo.overlong_share=1.5"], "algo.overlong_share"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_combinations_that_cannot_work_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(compose(words))


# --- not a number ----------------------------------------------------------------------------------------------------


def _broken(make_policy: Maker, what: str) -> tuple[Any, str]:
    policy = make_policy(adapted=True, quant="bf16")
    layer = policy.model.model.layers[1]
    with torch.no_grad():
        if what == "weight":
            layer.post_attention_layernorm.weight[3] = math.nan
            return policy, "weight model.layers.1.post_attention_layernorm.weight"
        layer.mlp.gate_proj.lora_B["default"].weight.fill_(3e38)
        return policy, "output of model.layers.1.mlp.gate_proj"


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """A run directory with two lines of metrics."""
    return SimpleNamespace(path=tmp_path, metrics=lambda: [{"step": 6, "loss": 0.1}, {"step": 7, "loss": 0.2}])


def _dumped(run: Any, step: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    folder = run.path / "nonfinite" / f"step_{step:06d}"
    return json.loads((folder / "report.json").read_text()), load_file(folder / "batch.safetensors")


@pytest.mark.parametrize("mode", ["stop", "skip"])
@pytest.mark.parametrize("what", ["weight", "activation"])
def test_the_first_tensor_that_is_not_finite_is_named(
    make_policy: Maker, make_experiment: Maker, run: Any, what: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy, name = _broken(make_policy, what)
    words = ("quant=bf16", "algo=grpo", "train.micro_batch_tokens=24", f"train.on_nonfinite={mode}")
    experiment = make_experiment(*words)
    before = _state(policy)
    optimizer = make_optimizer(policy, experiment.optim)
    if mode == "stop":
        with pytest.raises(TrainingStopped, match=rf"step 8: the loss .*First: {name}.*train\.on_nonfinite=skip"):
            update(experiment, policy, optimizer, _batch(policy), run, 8)
    else:
        step_metrics = update(experiment, policy, optimizer, _batch(policy), run, 8)
        assert step_metrics["updates_skipped"] == 1 and not math.isfinite(step_metrics["loss"])
        assert "skipped" in caplog.text
        assert all(parameter.grad is None for parameter in policy.trainable)
        assert not policy.model.training
    report, tensors = _dumped(run, 8)
    assert report.pop("first").startswith(name)
    assert report == {"step": 8, "what": "loss", "last_metrics": {"step": 7, "loss": 0.2}}
    assert tensors["input_ids"].shape[0] == 2 and {"weights", "old_logprobs", "logprobs"} <= set(tensors)
    assert all(torch.equal(a, b) for a, b in zip(_state(policy), before, strict=True))


def test_a_gradient_that_is_not_finite_is_named_and_its_update_left_out(
    make_policy: Maker, make_experiment: Maker, run: Any
) -> None:
    policy = make_policy(adapted=True)
    experiment = make_experiment("quant=nvfp4", "algo=grpo", "train.on_nonfinite=skip")
    names = [name for name, parameter in policy.model.named_parameters() if parameter.requires_grad]
    target = next(name for name in names if "layers.0.self_attn.q_proj.lora_A" in name)
    handle = dict(policy.model.named_parameters())[target].register_hook(lambda gradient: gradient * math.inf)
    before, optimizer = _state(policy), make_optimizer(policy, experiment.optim)
    skipped = update(experiment, policy, optimizer, _batch(policy), run, 1)
    report, tensors = _dumped(run, 1)
    assert (report["what"], report["first"]) == ("gradient", f"gradient of {target}")
    assert torch.equal(tensors["input_ids"], _batch(policy).input_ids)
    assert set(tensors) == {"input_ids", "mask", "lengths", "advantages", "sampler_logprobs"}
    assert skipped["updates_skipped"] == 1 and math.isfinite(skipped["loss"])
    assert not math.isfinite(skipped["grad_norm"])
    assert all(torch.equal(a, b) for a, b in zip(_state(policy), before, strict=True))
    handle.remove()
    assert update(experiment, policy, optimizer, _batch(policy), NO_RUN, 2)["updates_skipped"] == 0
    assert not all(torch.equal(a, b) for a, b in zip(_state(policy), before, strict=True))


def test_a_dump_before_any_metrics_of_tensors_that_are_not_contiguous_or_share_memory(tmp_path: Path) -> None:
    """Log-probabilities before and after the first of one update share memory."""
    run: Any = SimpleNamespace(path=tmp_path, metrics=lambda: [])
    values = torch.arange(6.0).view(2, 3)
    tensors = {"logprobs": values, "old_logprobs": values, "input_ids": values.t()}
    assert str(tmp_path / "nonfinite" / "step_000001") in dump(run, 1, NonFiniteError("gradient", "x", tensors))
    report, loaded = _dumped(run, 1)
    assert report == {"step": 1, "what": "gradient", "first": "x", "last_metrics": None}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
