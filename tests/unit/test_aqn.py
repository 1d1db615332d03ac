"""One draw of noise: what really happens to the norm scales, and that nothing is left of it afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from qerl_bench.aqn.injector import block_norms, perturbed
from qerl_bench.checks import TrainingStopped


def _norms(count: int = 4, width: int = 4096, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> dict[str, Any]:
    norms = {f"norm_{i}": Qwen2RMSNorm(width).to(dtype) for i in range(count)}
    for norm in norms.values():
        norm.weight.data.fill_(scale)
    return norms


def _values(norms: dict[str, Any]) -> torch.Tensor:
    return torch.stack([norm.weight.detach().double() for norm in norms.values()])


@pytest.mark.parametrize("sigma", [1e-1, 1e-2, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_noise_is_gaussian_of_the_asked_size(sigma: float, dtype: torch.dtype) -> None:
    """16,384 draws: the standard deviation is known to 0.55 %, its mean to 0.8 % of sigma. Five are allowed."""
    norms = _norms(dtype=dtype)
    with perturbed(norms, sigma, seed=3) as report:
        noise = (_values(norms) - 1.0) / sigma
    assert noise.std().item() == pytest.approx(1.0, abs=5 * 0.0055)
    assert abs(noise.mean().item()) < 5 * 0.0078
    assert (noise.abs() < 1).double().mean().item() == pytest.approx(0.6827, abs=5 * 0.0037)  # normal, not uniform
    correlation = torch.corrcoef(noise)
    assert (correlation - torch.eye(4)).abs().max() < 5 / 4096**0.5  # no two norms share their noise
    assert report.sigma == sigma
    assert report.sigma_realised == pytest.approx(noise.square().mean().sqrt().item() * sigma, rel=1e-9)
    assert report.norms_perturbed == 4


def test_same_seed_same_noise_other_seed_other_noise() -> None:
    def drawn(seed: int, sigma: float = 1e-2) -> torch.Tensor:
        norms = _norms(width=64)
        torch.manual_seed(torch.randint(0, 2**31, ()).item())  # the global state has no say
        with perturbed(norms, sigma, seed):
            return _values(norms)

    assert torch.equal(drawn(5), drawn(5))
    assert not torch.equal(drawn(5), drawn(6))
    assert torch.allclose(drawn(5, 1e-1) - 1, 10 * (drawn(5, 1e-2) - 1), rtol=1e-3, atol=1e-6)  # sigma only scales it


def test_noise_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with perturbed(_norms(width=64), 1e-2, seed=1):
        pass
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_scales_are_restored_bit_for_bit(dtype: torch.dtype, failing: bool, trained: bool) -> None:
    torch.manual_seed(0)
    norms = _norms(width=64, dtype=dtype)
    for norm in norms.values():
        norm.weight.data.normal_(1.0, 0.3)
        norm.weight.requires_grad_(trained)
    parameters = {name: norm.weight for name, norm in norms.items()}
    bits = {name: norm.weight.detach().clone() for name, norm in norms.items()}

    def noisy() -> None:
        with perturbed(norms, 1e-2, seed=1):
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


def test_noise_that_rounds_away_is_an_error_and_leaves_nothing_behind() -> None:
    norms = _norms(width=64)
    parameters = [norm.weight for norm in norms.values()]
    refused = pytest.raises(TrainingStopped, match=r"sigma 1e-12 changed 0 of 4 norms.*larger sigma")
    with refused, perturbed(norms, 1e-12, seed=1):
        pass
    assert all(norm.weight is parameter for norm, parameter in zip(norms.values(), parameters, strict=True))
    assert not any(norm._forward_hooks for norm in norms.values())


def test_sigma_zero_touches_nothing() -> None:
    norms = _norms(width=64)
    parameters = [norm.weight for norm in norms.values()]
    with perturbed(norms, 0.0, seed=1) as report:
        assert all(norm.weight is parameter for norm, parameter in zip(norms.values(), parameters, strict=True))
    assert (report.sigma, report.sigma_realised, report.norms_perturbed) == (0.0, 0.0, 0)


@pytest.mark.parametrize("quant", ["bf16", "nvfp4", "mxfp4"])
def test_every_block_norm_of_a_policy_and_no_other_is_perturbed(make_policy: Callable[..., Any], quant: str) -> None:
    policy = make_policy("model.layers=3", quant=quant)
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    with policy.perturbed(1e-2, seed=7) as report:
        assert report.norms_perturbed == 6
        during = policy.model.state_dict()
        changed = {name for name in before if not torch.equal(before[name], during[name])}
        assert changed == {
            f"model.layers.{i}.{norm}.weight"
            for i in range(3)
            for norm in ("input_layernorm", "post_attention_layernorm")
        }
    after = policy.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_small_noise_survives_in_a_bfloat16_model(make_policy: Callable[..., Any]) -> None:
    """sigma 1e-4 on scales near 1 is 1/40 of a BF16 step: rounded to BF16 it would be gone."""
    policy = make_policy("model.dtype=bfloat16", width=64)
    torch.manual_seed(0)
    for norm in policy.norms.values():
        norm.weight.data.normal_(1.0, 0.2)
    input_ids = torch.randint(0, 256, (8, 40))
    with torch.no_grad():
        clean = policy.model(input_ids=input_ids).logits
        with policy.perturbed(1e-4, seed=7) as report:
            noisy = policy.model(input_ids=input_ids).logits
        again = policy.model(input_ids=input_ids).logits
    assert report.norms_perturbed == 4
    assert report.sigma_realised == pytest.approx(1e-4, rel=5 / (2 * 4 * 64) ** 0.5)
    assert noisy.dtype == clean.dtype == torch.bfloat16
    assert not torch.equal(noisy, clean)
    assert torch.equal(again, clean)


@pytest.mark.parametrize(("sigma", "tolerance"), [(1e-3, 0.05), (1e-4, 0.25)])
def test_small_noise_reaches_bfloat16_activations_at_its_true_size(sigma: float, tolerance: float) -> None:
    """Single activations round, their mean does not: a fit of the change against z * x finds slope 1 (s.e. below 0.02).

    Products of two BF16 numbers lie on a grid; those halfway between two results tip over at any noise at all, which
    is felt only where the noise is as small as that grid.
    """
    torch.manual_seed(0)
    norms = _norms(count=1, width=4096, dtype=torch.bfloat16)
    norm = norms["norm_0"]
    norm.weight.data.normal_(1.0, 0.2)
    weight = norm.weight.detach().double()
    x = torch.randn(64, 4096, dtype=torch.bfloat16)
    with torch.no_grad():
        clean = norm(x).double()
        with perturbed(norms, sigma, seed=1):
            change = norm(x).double() - clean
            expected = (norm.weight.double() - weight) * (clean / weight)
    slope = (change * expected).sum() / expected.square().sum()
    assert slope.item() == pytest.approx(1.0, abs=tolerance)


def test_norm_output_keeps_the_dtype_of_its_input() -> None:
    norms = _norms(count=1, width=64, dtype=torch.bfloat16)
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    with perturbed(norms, 1e-2, seed=1):
        assert norms["norm_0"].weight.dtype == torch.float32
        assert norms["norm_0"](x).dtype == torch.bfloat16


def test_noise_on_a_norm_equals_noise_on_the_columns_of_the_next_weights(make_policy: Callable[..., Any]) -> None:
    """RMSNorm multiplies input column j of q, k, v (gate, up) by w_j, so w + Z is the same as W diag((w + Z) / w)."""
    policy = make_policy(quant="bf16", width=64, sharp=True)
    torch.manual_seed(0)
    for norm in policy.norms.values():
        norm.weight.data.normal_(1.0, 0.2)
    other = copy.deepcopy(policy.model)
    input_ids = torch.randint(0, 256, (3, 17))
    with torch.no_grad():
        clean = policy.model(input_ids=input_ids).logits
        with policy.perturbed(0.05, seed=7):
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
    assert len(block_norms(model, 2)) == 4
    with pytest.raises(AssertionError, match="found 4 block norms in Qwen2ForCausalLM, expected 6"):
        block_norms(model, 3)
    layer = model.model.layers[1]
    layer.ln_2 = layer.post_attention_layernorm
    del layer.post_attention_layernorm
    with pytest.raises(AssertionError, match="found 3 block norms"):
        block_norms(model, 2)
