"""The noise injector: what one draw does to the norm scales, and every option of `noise`."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from qerl_bench.aqn.base import OpenLoop
from qerl_bench.aqn.constant import Constant
from qerl_bench.aqn.injector import NoiseInjector, noise_metrics
from qerl_bench.model.structure import structure_of
from qerl_bench.model_setup import build_noise
from qerl_bench.train import objective
from qerl_bench.train.batch import make_batch
from qerl_bench.train.update import make_optimizer, update
from qerl_core.checks import ConfigError, TrainingStopped


def _norms(count: int = 4, width: int = 4096, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> dict[str, Any]:
    names = [*(f"model.layers.{i}.input_layernorm" for i in range(count - 1)), "model.norm"]
    norms = {name: Qwen2RMSNorm(width).to(dtype) for name in names}
    for norm in norms.values():
        norm.weight.data.fill_(scale)
    return norms


def _values(norms: Any) -> torch.Tensor:
    """All scales (norms, width) in FP64."""
    return torch.stack([norm.weight.detach().double() for norm in norms.values()])


def _scales(noise: NoiseInjector, step: int, draw: int = 0) -> torch.Tensor:
    """`_values` during a rollout with one draw of noise."""
    with noise.for_rollout(step, draw):
        return _values(noise.norms)


# --- one draw --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [1e-1, 1e-2, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_noise_is_gaussian_of_the_asked_size(make_noise: Callable[..., Any], sigma: float, dtype: torch.dtype) -> None:
    """16,384 draws: the standard deviation is known to 0.55 %, its mean to 0.8 % of sigma. Five are allowed."""
    norms = _norms(dtype=dtype)
    with make_noise(norms, sigma).for_rollout(1, 0) as report:
        noise = (_values(norms) - 1.0) / sigma
    assert noise.std().item() == pytest.approx(1.0, abs=5 * 0.0055)
    assert abs(noise.mean().item()) < 5 * 0.0078
    assert (noise.abs() < 1).double().mean().item() == pytest.approx(0.6827, abs=5 * 0.0037)  # normal, not uniform
    correlation = torch.corrcoef(noise)
    assert (correlation - torch.eye(4)).abs().max() < 5 / 4096**0.5  # no two norms share their noise
    assert report.sigma == sigma
    assert report.sigma_realised == pytest.approx(noise.square().mean().sqrt().item() * sigma, rel=1e-9)
    assert report.norms_perturbed == 4


def test_same_seed_same_noise_other_seed_other_noise(make_noise: Callable[..., Any]) -> None:
    def drawn(seed: int, sigma: float = 1e-2) -> torch.Tensor:
        norms = _norms(width=64)
        torch.manual_seed(torch.randint(0, 2**31, ()).item())  # the global state has no say
        with make_noise(norms, sigma, seed).for_rollout(1, 0):
            return _values(norms)

    assert torch.equal(drawn(5), drawn(5))
    assert not torch.equal(drawn(5), drawn(6))
    assert torch.allclose(drawn(5, 1e-1) - 1, 10 * (drawn(5, 1e-2) - 1), rtol=1e-3, atol=1e-6)  # sigma only scales it


def test_noise_leaves_the_global_random_state_alone(make_noise: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with make_noise(_norms(width=64), 1e-2).for_rollout(1, 0):
        pass
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_scales_are_restored_bit_for_bit(
    make_noise: Callable[..., Any], dtype: torch.dtype, failing: bool, trained: bool
) -> None:
    torch.manual_seed(0)
    norms = _norms(width=64, dtype=dtype)
    for norm in norms.values():
        norm.weight.data.normal_(1.0, 0.3)
        norm.weight.requires_grad_(trained)
    parameters = {name: norm.weight for name, norm in norms.items()}
    bits = {name: norm.weight.detach().clone() for name, norm in norms.items()}

    def noisy() -> None:
        with make_noise(norms, 1e-2).for_rollout(1, 0):
            assert all(not torch.equal(norm.weight.to(dtype), bits[name]) for name, norm in norms.items())
            if failing:
                raise RuntimeError("in the middle of a rollout")

    if failing:
        with pytest.raises(RuntimeError):
            noisy()
    else:
        noisy()
    for name, norm in norms.items():
        assert norm.weight is parameters[name]
        assert norm.weight.dtype == dtype and norm.weight.requires_grad is trained
        assert torch.equal(norm.weight, bits[name])
        assert not norm._forward_hooks
        assert list(norm._parameters) == ["weight"]


def test_noise_that_rounds_away_is_an_error_and_leaves_nothing_behind(make_noise: Callable[..., Any]) -> None:
    norms = _norms(width=64)
    parameters = [norm.weight for norm in norms.values()]
    refused = pytest.raises(TrainingStopped, match=r"sigma 1e-12 changed 0 of 4 norms.*larger sigma")
    with refused, make_noise(norms, 1e-12).for_rollout(1, 0):
        pass
    assert all(norm.weight is parameter for norm, parameter in zip(norms.values(), parameters, strict=True))
    assert not any(norm._forward_hooks for norm in norms.values())


def test_sigma_zero_touches_nothing(make_noise: Callable[..., Any]) -> None:
    norms = _norms(width=64)
    parameters = [norm.weight for norm in norms.values()]
    with make_noise(norms, 0.0).for_rollout(1, 0) as report:
        assert all(norm.weight is parameter for norm, parameter in zip(norms.values(), parameters, strict=True))
    assert (report.sigma, report.sigma_realised, report.norms_perturbed) == (0.0, 0.0, 0)


def test_small_noise_survives_in_a_bfloat16_model(
    make_noise: Callable[..., Any], make_policy: Callable[..., Any]
) -> None:
    """sigma 1e-4 on scales near 1 is 1/40 of a BF16 step: rounded to BF16 it would be gone."""
    policy = make_policy("model.dtype=bfloat16", width=64)
    torch.manual_seed(0)
    for norm in policy.norms.values():
        norm.weight.data.normal_(1.0, 0.2)
    input_ids = torch.randint(0, 256, (8, 40))
    with torch.no_grad():
        clean = policy.model(input_ids=input_ids).logits
        with make_noise(policy.norms, 1e-4).for_rollout(1, 0) as report:
            noisy = policy.model(input_ids=input_ids).logits
        again = policy.model(input_ids=input_ids).logits
    assert report.norms_perturbed == 4
    assert report.sigma_realised == pytest.approx(1e-4, rel=5 / (2 * 4 * 64) ** 0.5)
    assert noisy.dtype == clean.dtype == torch.bfloat16
    assert not torch.equal(noisy, clean)
    assert torch.equal(again, clean)


@pytest.mark.parametrize(("sigma", "tolerance"), [(1e-3, 0.05), (1e-4, 0.25)])
def test_small_noise_reaches_bfloat16_activations_at_its_true_size(
    make_noise: Callable[..., Any], sigma: float, tolerance: float
) -> None:
    """Single activations round, their mean does not: a fit of the change against z * x finds slope 1 (s.e. below 0.02).

    Products of two BF16 numbers lie on a grid; those halfway between two results tip over at any noise at all, which
    is felt only where the noise is as small as that grid.
    """
    torch.manual_seed(0)
    norms = _norms(count=1, width=4096, dtype=torch.bfloat16)
    norm = norms["model.norm"]
    norm.weight.data.normal_(1.0, 0.2)
    weight = norm.weight.detach().double()
    x = torch.randn(64, 4096, dtype=torch.bfloat16)
    with torch.no_grad():
        clean = norm(x).double()
        with make_noise(norms, sigma).for_rollout(1, 0):
            change = norm(x).double() - clean
            expected = (norm.weight.double() - weight) * (clean / weight)
    slope = (change * expected).sum() / expected.square().sum()
    assert slope.item() == pytest.approx(1.0, abs=tolerance)


def test_noise_on_a_norm_equals_noise_on_the_columns_of_the_next_weights(
    make_noise: Callable[..., Any], make_policy: Callable[..., Any]
) -> None:
    """RMSNorm multiplies input column j of q, k, v (gate, up) by w_j, so w + Z is the same as W diag((w + Z) / w)."""
    policy = make_policy(quant="bf16", width=64, sharp=True)
    torch.manual_seed(0)
    for norm in policy.norms.values():
        norm.weight.data.normal_(1.0, 0.2)
    other = copy.deepcopy(policy.model)
    input_ids = torch.randint(0, 256, (3, 17))
    with torch.no_grad():
        clean = policy.model(input_ids=input_ids).logits
        with make_noise(policy.norms, 0.05).for_rollout(1, 0):
            noisy = policy.model(input_ids=input_ids).logits
            factors = {name: norm.weight.detach().clone() for name, norm in policy.norms.items()}
        for i, layer in enumerate(other.model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            for norm, linears in (
                ("input_layernorm", (attention.q_proj, attention.k_proj, attention.v_proj)),
                ("post_attention_layernorm", (mlp.gate_proj, mlp.up_proj)),
            ):
                name = f"model.layers.{i}.{norm}"
                factor = factors[name] / policy.norms[name].weight
                for linear in linears:
                    linear.base_layer.weight.mul_(factor[None, :])  # the fresh adapter adds nothing
        moved = other(input_ids=input_ids).logits
    assert (noisy - clean).abs().max() > 1e-2
    assert torch.allclose(moved, noisy, rtol=0, atol=2e-5 * float(clean.abs().max()))


def test_a_model_whose_norms_are_not_all_found_is_refused(make_policy: Callable[..., Any]) -> None:
    model = make_policy(quant="bf16").model
    assert len(structure_of(model).sites) == 4
    model.model.layers[1].mlp.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1.0,))
    with pytest.raises(AssertionError, match=r"qwen2 .* found 3 in 2 blocks"):
        structure_of(model)


# --- which norms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", ["bf16", "nvfp4"])
@pytest.mark.parametrize("choice", ["blocks", "blocks_final", "missed"])
def test_which_norms_are_perturbed(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], choice: str, quant: str
) -> None:
    words = ("model.layers=3", f"noise.norms={choice}", "aqn=constant")
    policy, experiment = make_policy("model.layers=3", quant=quant), make_experiment(*words)
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    with build_noise(experiment, policy.model, policy.structure, policy.layers).for_rollout(1, 0) as report:
        during = policy.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], during[name])}
    blocks = {
        f"model.layers.{i}.{norm}.weight" for i in range(3) for norm in ("input_layernorm", "post_attention_layernorm")
    }
    expected = {"blocks": blocks, "blocks_final": blocks | {"model.norm.weight"}, "missed": set()}[choice]
    assert changed == expected
    assert report.sigma == 1e-2
    assert report.norms_perturbed == len(expected)
    assert (report.sigma_realised == 0) is (choice == "missed")
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.model.state_dict().items())


def test_the_shipped_hook_does_nothing_and_says_so(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    policy = make_policy()
    noise = build_noise(
        make_experiment("recipe=as_released", "steps=10"), policy.model, policy.structure, policy.layers
    )
    assert "noise.norms=missed" in caplog.text
    input_ids = torch.randint(0, 256, (2, 9))
    with torch.no_grad():
        clean = policy.model(input_ids=input_ids).logits
        with noise.for_rollout(5, 0) as report:
            assert torch.equal(policy.model(input_ids=input_ids).logits, clean)
    assert report.sigma > 0
    assert (report.norms_perturbed, report.sigma_realised, report.scales_changed) == (0, 0.0, 0.0)


# --- how large -------------------------------------------------------------------------------------------------------


def test_relative_noise_scales_with_each_scale_and_absolute_does_not(make_noise: Callable[..., Any]) -> None:
    norms = _norms(count=2)
    torch.manual_seed(0)
    for norm in norms.values():
        norm.weight.data.uniform_(-4, 4)
    norms["model.norm"].weight.data[:7] = 0.0
    clean = _values(norms)
    absolute = _scales(make_noise(norms), 1) - clean
    noise = make_noise(norms, relative=True)
    relative = _scales(noise, 1) - clean
    assert torch.allclose(relative, absolute * clean.abs(), rtol=0, atol=1e-6)  # the same normals, times |w|
    assert not relative[1, :7].any()
    with noise.for_rollout(1, 0) as report:
        assert report.sigma_realised == pytest.approx(1e-2, rel=5 * 0.008)
        assert report.scales_changed == pytest.approx(1 - 7 / 8192, abs=2 / 8192)


def test_factors_share_the_noise_out_and_zero_leaves_a_norm_alone(make_noise: Callable[..., Any]) -> None:
    norms = _norms(count=3)
    first, second, final = norms
    noise = make_noise(norms, per_norm_scale={first: 2.0, second: 0.5, final: 0.0})
    with noise.for_rollout(1, 0) as report:
        sizes = [(norm.weight.double() - 1).std().item() for norm in norms.values()]
    assert sizes == pytest.approx([2e-2, 5e-3, 0.0], rel=5 * 0.011)
    assert report.norms_perturbed == 2


@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("sigma", [1e-2, 1e-3, 1e-4])
def test_bfloat16_addition_loses_small_noise(make_noise: Callable[..., Any], sigma: float, scale: float) -> None:
    """At a power of two, BF16 steps are scale / 128 upwards and scale / 256 downwards: half of one must be reached."""
    up, down = scale / 256, scale / 512
    share = 0.5 * math.erfc(up / sigma / 2**0.5) + 0.5 * math.erfc(down / sigma / 2**0.5)
    with make_noise(_norms(dtype=torch.bfloat16, scale=scale), sigma, add_dtype="bfloat16").for_rollout(1, 0) as report:
        assert report.scales_changed == pytest.approx(share, abs=5 * 0.004)
    with make_noise(_norms(dtype=torch.bfloat16, scale=scale), sigma).for_rollout(1, 0) as report:
        assert report.scales_changed > 0.95
        assert report.sigma_realised == pytest.approx(sigma, rel=5 * 0.0055)
        assert report.norms_perturbed == 4


def test_bfloat16_addition_by_hand(make_noise: Callable[..., Any]) -> None:
    """At 1.0 BF16 steps are 2^-7 upwards and 2^-8 downwards; ties go to the even neighbour."""
    norms = _norms(count=1, width=6)
    noise = make_noise(norms, add_dtype="bfloat16")
    noise.noise = {"model.norm": torch.tensor([0.003, 0.0039, 0.005, -0.0019, -0.0021, -0.004])}
    with noise.for_training():
        assert norms["model.norm"].weight.dtype == torch.float32  # the sum is stored as the scale was
        assert ((norms["model.norm"].weight - 1) * 256).tolist() == [0, 0, 2, 0, -1, -1]


# --- how often drawn anew --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cadence", "expected"),
    [
        ("run", [(0, [1, 2, 3, 4, 5])]),
        ("step", [(0, [1, 2, 3, 4, 5])]),
        ("batch", [(7, [1, 2]), (8, [3, 4]), (9, [5])]),
        ("group", [(7, [1]), (8, [2]), (9, [3]), (10, [4]), (11, [5])]),
    ],
)
def test_prompts_that_share_a_draw(
    make_experiment: Callable[..., Any], cadence: str, expected: list[tuple[int, list[int]]]
) -> None:
    """With seven draws behind them; a step's only draw is used again for prompts that come later."""
    spec = replace(make_experiment().noise, cadence=cadence, prompts_per_draw=2)
    assert list(spec.draws([1, 2, 3, 4, 5], 7)) == expected
    assert list(spec.draws([], 7)) == []


def test_the_same_draw_twice_does_not_accumulate_twice(make_noise: Callable[..., Any]) -> None:
    noise = make_noise(_norms(width=64), accumulate="all")
    assert torch.equal(_scales(noise, 1), _scales(noise, 1))
    assert not torch.equal(_scales(noise, 1), _scales(noise, 2))


@pytest.mark.parametrize("cadence", ["step", "batch", "group"])
def test_every_step_and_every_draw_has_noise_of_its_own(make_noise: Callable[..., Any], cadence: str) -> None:
    noise = make_noise(_norms(width=256), cadence=cadence)
    drawn = [_scales(noise, step, draw) for step in (1, 2) for draw in (0, 1, 2)]
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            assert abs(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]) < 5 / one.numel() ** 0.5
    again = make_noise(_norms(width=256), cadence=cadence)
    assert torch.equal(_scales(again, 2, 1), drawn[4])  # whatever was drawn before
    assert not torch.equal(_scales(make_noise(_norms(width=256), cadence=cadence, seed=1), 2, 1), drawn[4])


def test_cadence_run_keeps_one_draw(make_noise: Callable[..., Any]) -> None:
    noise = make_noise(_norms(width=64), cadence="run")
    assert torch.equal(_scales(noise, 1), _scales(noise, 9))


def test_metrics_of_several_draws_by_hand(make_noise: Callable[..., Any]) -> None:
    noise = make_noise(_norms(count=2, width=3), cadence="group")
    reports = []
    for draw in range(3):
        with noise.for_rollout(1, draw) as report:
            reports.append(report)
    squares = [((_scales(noise, 1, draw) - 1) ** 2).mean().item() for draw in range(3)]
    found = noise_metrics(reports)
    assert found["aqn/sigma_realised"] == pytest.approx((sum(squares) / 3) ** 0.5, rel=1e-9)
    assert (found["aqn/sigma"], found["aqn/norms_perturbed"], found["aqn/scales_changed"]) == (1e-2, 2, 1.0)


# --- what stays ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("add_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("accumulate", "walking"), [("none", 0), ("final", 1), ("all", 4)])
def test_accumulated_noise_is_a_random_walk(
    make_noise: Callable[..., Any], accumulate: str, walking: int, add_dtype: str
) -> None:
    """After n steps a walk is sqrt(n) sigma away; noise that is drawn anew stays at sigma."""
    noise = make_noise(_norms(dtype=torch.bfloat16), 5e-2, accumulate=accumulate, add_dtype=add_dtype)
    for step in range(1, 17):
        scales = _scales(noise, step)
    sizes = ((scales - 1).square().mean(1).sqrt() / 5e-2).tolist()
    assert sizes == pytest.approx([1.0] * (4 - walking) + [4.0] * walking, rel=0.06)
    assert all(bool((norm.weight == 1).all()) for norm in noise.norms.values())  # the trainer's scales stay clean


def test_a_walk_by_hand_and_it_stays_when_sigma_is_zero(make_noise: Callable[..., Any]) -> None:
    noise = make_noise(_norms(width=64), accumulate="all")
    fresh = make_noise(_norms(width=64))
    steps = [_scales(fresh, step) - 1 for step in (1, 2, 3)]
    walk = [_scales(noise, step) - 1 for step in (1, 2, 3)]
    for n, position in enumerate(walk, start=1):
        assert torch.allclose(position, sum(steps[:n]), rtol=0, atol=1e-6)
    noise.controller = OpenLoop(Constant(name="constant", level=0.0), 100)
    with noise.for_rollout(4, 0) as report:
        assert report.sigma == 0 and report.norms_perturbed == 4
    assert torch.equal(_scales(noise, 5) - 1, walk[-1])


@pytest.mark.parametrize("accumulate", ["none", "final", "all"])
def test_noise_continues_exactly_after_a_checkpoint(
    make_noise: Callable[..., Any], tmp_path: Any, accumulate: str
) -> None:
    straight = make_noise(_norms(width=64), accumulate=accumulate)
    expected = [_scales(straight, step) for step in range(1, 7)]
    before = make_noise(_norms(width=64), accumulate=accumulate)
    for step in range(1, 4):
        _scales(before, step)
    torch.save(before.state(), tmp_path / "noise.pt")
    after = make_noise(_norms(width=64), accumulate=accumulate)
    after.restore(torch.load(tmp_path / "noise.pt", weights_only=True))
    assert all(torch.equal(_scales(after, step), expected[step - 1]) for step in range(4, 7))


# --- who sees it -----------------------------------------------------------------------------------------------------


def test_the_trainer_repeats_the_samplers_noise_and_gives_it_back(make_noise: Callable[..., Any]) -> None:
    noise = make_noise(_norms(width=64))
    sampled = _scales(noise, 3)
    with noise.for_training():
        assert torch.equal(_values(noise.norms), sampled)
    assert all(bool((norm.weight == 1).all()) for norm in noise.norms.values())


def test_scales_that_are_trained_get_their_gradient_through_the_noise(make_noise: Callable[..., Any]) -> None:
    """d/dw of sum((w + z) x) is the normalised x, whatever z; twice the backward pass, twice the gradient."""
    norms = _norms(count=1, width=8)
    norm = norms["model.norm"]
    noise = make_noise(norms, 0.5)
    with noise.for_rollout(1, 0):
        pass
    x = torch.randn(3, 8)
    expected = (x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()).sum(0)
    with noise.for_training():
        assert not norm.weight.is_leaf
        norm(x).sum().backward()
        norm(x).sum().backward()
    assert torch.allclose(norm.weight.grad, 2 * expected, atol=1e-5)


NO_RUN: Any = None  # a run directory is needed only if something is not finite


@pytest.mark.parametrize("site", ["rollout", "rollout_and_old_logprobs", "rollout_and_training"])
def test_which_log_probabilities_carry_the_noise(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], listen: Callable[..., Any], site: str
) -> None:
    policy = make_policy(sharp=True, adapted=True)
    experiment = make_experiment("aqn=constant", "aqn.level=0.1", f"noise.site={site}")
    noise = build_noise(experiment, policy.model, policy.structure, policy.layers)
    batch = make_batch([[5, 6, 7], [8, 9]], [[1, 2, 3], [4, 5]], policy.pad_id, policy.device)
    clean = policy.token_stats(batch.input_ids, batch.mask, 1.0)
    with noise.for_rollout(1, 0), torch.no_grad():
        noisy = policy.token_stats(batch.input_ids, batch.mask, 1.0)
    assert (noisy.logprobs - clean.logprobs).abs().max() > 1e-3
    batch = make_batch(
        [[5, 6, 7], [8, 9]],
        [[1, 2, 3], [4, 5]],
        policy.pad_id,
        policy.device,
        [noisy.logprobs[0, 3:6].tolist(), noisy.logprobs[1, 2:4].tolist()],
        torch.tensor([1.0, -0.5]),
    )
    policy.noise = noise
    losses = listen(objective, "step_loss")
    found = update(experiment, policy, make_optimizer(policy, experiment.optim), batch, NO_RUN, 1)
    ((_, _, terms, _),) = losses
    expected = {
        "rollout": (clean, clean),
        "rollout_and_old_logprobs": (clean, noisy),
        "rollout_and_training": (noisy, noisy),
    }[site]
    for used, stats in zip((terms.logprobs, terms.old_logprobs), expected, strict=True):
        assert torch.allclose(used[terms.mask], stats.logprobs[batch.mask], rtol=0, atol=1e-5)  # longest first
    # the reported entropy is the clean policy's at every site; the mismatch is what the trainer really has against it
    assert found["entropy_clean"] == pytest.approx(clean.entropy[batch.mask].mean().item(), rel=1e-5)
    assert (found["mismatch/logp_abs_max"] < 1e-5) is (site == "rollout_and_training")


# --- what it costs ---------------------------------------------------------------------------------------------------


class _Operations(TorchDispatchMode):
    """Counts the operations of a forward pass and the bytes of the tensors they make."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        self.bytes += sum(
            t.nbytes for t in (made if isinstance(made, tuple) else (made,)) if isinstance(t, torch.Tensor)
        )
        return made


def test_noise_adds_no_operation_and_no_tensor_to_the_forward_pass(
    make_noise: Callable[..., Any], make_policy: Callable[..., Any]
) -> None:
    policy = make_policy()
    input_ids = torch.randint(0, 256, (2, 9))
    with torch.no_grad():
        policy.model(input_ids=input_ids)
        with _Operations() as clean:
            policy.model(input_ids=input_ids)
        parameters = [tensor.shape for tensor in policy.model.state_dict().values()]
        with make_noise(policy.norms, 0.05).for_rollout(1, 0):
            with _Operations() as noisy:
                policy.model(input_ids=input_ids)
            assert [tensor.shape for tensor in policy.model.state_dict().values()] == parameters
    assert noisy.names == clean.names
    assert noisy.bytes == clean.bytes


def test_a_noise_step_costs_milliseconds_at_seven_billion_parameters(make_noise: Callable[..., Any]) -> None:
    """56 norms of width 3584, as in Qwen2.5-7B: in and out in well under the time of one decoded token batch."""
    noise = make_noise(_norms(count=56, width=3584, dtype=torch.bfloat16))
    seconds = []
    for step in range(1, 4):
        started = time.perf_counter()
        with noise.for_rollout(step, 0):
            pass
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.25  # measured: see docs/aqn.md; a loaded machine is allowed much more


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"norms": "all"}, "blocks, blocks_final, missed"),
        ({"relative": 1}, "true or false"),
        ({"cadence": "token"}, "run, step, batch, group"),
        ({"prompts_per_draw": 0}, "at least 1"),
        ({"prompts_per_draw": True}, "at least 1"),
        ({"site": "everywhere"}, "rollout, rollout_and_old_logprobs, rollout_and_training"),
        ({"accumulate": True}, "none, final, all"),
        ({"add_dtype": "float16"}, "float32, bfloat16"),
        ({"site": "rollout_and_training", "cadence": "group"}, r"Use noise\.cadence=step"),
        ({"site": "rollout_and_old_logprobs", "cadence": "batch"}, r"Use noise\.cadence=step"),
        ({"accumulate": "all", "cadence": "run"}, r"Use noise\.accumulate=none"),
    ],
)
def test_noise_options_that_make_no_sense_are_refused(
    make_experiment: Callable[..., Any], changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(make_experiment().noise, **changed)
