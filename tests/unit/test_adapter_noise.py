"""Noise on adapters (noise.where=adapters): its size, who sees it, that it leaves no trace, and where it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from qerl_bench.dose import curve
from qerl_bench.engine import hf_reference
from qerl_bench.engine.base import Sampling
from qerl_bench.engine.rollout_queue import Limits
from qerl_bench.engine.sampler import Sampler
from qerl_bench.engine.vllm.sync import Mirror, clone
from qerl_bench.experiment import collect_rollouts
from qerl_bench.model.kernels import LoRALinear
from qerl_bench.model.policy import Policy
from qerl_bench.model.preflight import check_sites
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.run_setup import on_base_of
from qerl_bench.train.batch import make_batch
from qerl_core.checks import ConfigError, TrainingStopped
from qerl_core.options.fingerprint import as_dict, fingerprint
from qerl_core.process.device import PhaseTimer
from qerl_core.rundir.finished_run import with_later_keys
from qerl_core.rundir.run_checks import refuse_other_config

MakePolicy = Callable[..., Policy]
MakeExperiment = Callable[..., Any]
LAYERS = 14  # with an adapter, in two blocks
IDS = torch.arange(24).reshape(2, 12) % 97
MASK = (torch.arange(12) > 3).expand(2, 12)


def on_adapters(*words: str, level: float = 0.2) -> tuple[str, ...]:
    return ("noise.where=adapters", "aqn=constant", f"aqn.level={level}", *words)


def numbers(policy: Policy) -> dict[str, torch.Tensor]:
    """All parameters and buffers, packed weights included."""
    return {name: tensor.detach().clone() for name, tensor in policy.model.state_dict().items()}


def changed(policy: Policy, before: dict[str, torch.Tensor]) -> set[str]:
    now = policy.model.state_dict()
    assert now.keys() == before.keys()
    return {name for name, tensor in before.items() if not torch.equal(now[name], tensor)}


def logprobs(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return policy.token_stats(IDS, MASK, 1.0).logprobs


# --- size and seed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", ["bf16", "nvfp4"])
@pytest.mark.parametrize("alpha", [4, 16])
def test_sigma_is_the_size_of_the_change_over_that_of_the_weights(
    make_policy: MakePolicy, quant: str, alpha: int
) -> None:
    """B is 0, so the whole product is noise. That of a layer with 64 normals scatters by about a tenth."""
    policy = make_policy(*on_adapters(f"lora.alpha={alpha}", level=0.01), quant=quant)
    before, shares = numbers(policy), []
    with policy.noise.for_rollout(1, 0) as report, torch.no_grad():
        for layer in (module for module in policy.model.modules() if isinstance(module, LoRALinear)):
            base: Any = layer.get_base_layer()
            weight = base.dequantized() if isinstance(base, PackedLinear) else base.weight
            shares.append(float(layer.get_delta_weight("default").norm() / weight.norm()))
        assert changed(policy, before) == {name for name in before if ".lora_B." in name}
    assert shares == pytest.approx([0.01] * LAYERS, rel=0.5)
    assert (sum(share**2 for share in shares) / LAYERS) ** 0.5 == pytest.approx(0.01, rel=0.1)
    assert (report.sigma, report.norms_perturbed, report.scales_changed) == (0.01, LAYERS, 1.0)
    assert report.sigma_realised == pytest.approx(0.01, rel=0.1)


def test_the_size_follows_a_as_it_is_trained(make_policy: MakePolicy) -> None:
    layer = next(iter(make_policy(*on_adapters()).noise.adapters.values()))
    unit = layer.unit()
    with torch.no_grad():
        layer.a.get_parameter("weight").mul_(4.0)
    assert torch.allclose(layer.unit(), unit / 4)


def test_draws_depend_on_seed_and_step_and_not_on_the_format(make_policy: MakePolicy) -> None:
    def drawn(step: int, *words: str, quant: str = "bf16") -> torch.Tensor:
        noise = make_policy(*on_adapters(*words), quant=quant).noise
        with noise.for_rollout(step, 0):
            return torch.cat(
                [(one.b.get_parameter("weight") / one.unit()).flatten() for one in noise.adapters.values()]
            )

    first = drawn(1)
    assert torch.equal(drawn(1), first)
    assert torch.allclose(drawn(1, quant="mxfp4"), first, rtol=1e-4)
    for other in (drawn(2), drawn(1, "seed=1")):
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 5 / len(first) ** 0.5


# --- back to the same bits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_adapters_are_restored_bit_for_bit(make_policy: MakePolicy, error: type[BaseException] | None) -> None:
    policy = make_policy(*on_adapters(), adapted=True)

    def places() -> dict[str, tuple[int, int, bool]]:
        return {name: (id(p), p.data_ptr(), p.requires_grad) for name, p in policy.model.named_parameters()}

    before, where = numbers(policy), places()

    def in_noise() -> None:
        with policy.noise.for_rollout(1, 0):
            assert len(changed(policy, before)) == LAYERS and places() == where
            if error is not None:
                raise error

    if error is None:
        in_noise()
    else:
        with pytest.raises(error):
            in_noise()
    assert changed(policy, before) == set() and places() == where


def test_noise_that_rounds_away_is_an_error(make_policy: MakePolicy) -> None:
    policy = make_policy(*on_adapters(level=1e-12), adapted=True)
    before = numbers(policy)
    with pytest.raises(TrainingStopped, match=f"of {LAYERS} adapters: .*larger sigma"):
        policy.noise.for_rollout(1, 0)
    assert changed(policy, before) == set()


# --- who sees it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cadence", ["step", "group"])
def test_the_sampler_has_it_and_the_trainer_has_not(
    make_policy: MakePolicy, make_experiment: MakeExperiment, cadence: str
) -> None:
    """What was sampled has the probabilities of the policy with its draw, far from those without."""
    words = on_adapters(f"noise.cadence={cadence}")
    experiment, policy = make_experiment(*words, "quant=bf16"), make_policy(*words, quant="bf16", sharp=True)
    before = numbers(policy)
    groups, _, metrics = collect_rollouts(experiment, policy, experiment.engine.build(policy), 1, PhaseTimer("cpu"))
    assert changed(policy, before) == set()
    for number, group in enumerate(groups):
        of = group.rollouts
        sampled = torch.tensor([logprob for one in of for logprob in one.logprobs])
        batch = make_batch([one.prompt_ids for one in of], [one.token_ids for one in of], policy.pad_id, policy.device)
        gaps = {}
        for name, context in {
            "noisy": policy.noise.for_rollout(1, number if cadence == "group" else 0),
            "clean": nullcontext(),
        }.items():
            with context, torch.no_grad():
                found = policy.token_stats(batch.input_ids, batch.mask, 1.0).logprobs[batch.mask]
            gaps[name] = (found - sampled).abs().max().item()
        assert gaps["noisy"] < 1e-4 and gaps["clean"] > 0.1
    assert (metrics["aqn/sigma"], metrics["aqn/norms_perturbed"], metrics["aqn/scales_changed"]) == (0.2, LAYERS, 1.0)
    assert metrics["aqn/sigma_realised"] == pytest.approx(0.2, rel=0.1)


def test_a_dose_is_measured_on_a_policy_without_noise(make_policy: MakePolicy, make_experiment: MakeExperiment) -> None:
    """As `qerl-bench gates` does for an arm: the noise of its config in a policy that was built for all arms."""
    experiment, policy = make_experiment("noise.where=adapters", "quant=nvfp4"), make_policy(sharp=True)
    before, quiet = numbers(policy), policy.noise
    engine, prompts = experiment.engine.build(policy), experiment.task.train_prompts(1, 2, seed=0)
    kls = [one.kl for one in curve(experiment, policy, engine, prompts, (0.0, 0.05, 0.2), range(1))]
    assert kls[0] < 1e-6 < kls[1] < kls[2]
    assert policy.noise is quiet and changed(policy, before) == set()


@pytest.mark.parametrize("fused", [False, True])
def test_recorded_decoding_samples_what_transformers_samples(make_policy: MakePolicy, fused: bool) -> None:
    """In buffers that are kept and have seen the clean adapter first; in FP32 they are the parameters themselves."""
    shape = ("model.heads=4", "model.kv_heads=2", "lora.targets=[q_proj,k_proj,v_proj,o_proj,up_proj,down_proj]")
    policy = make_policy(*on_adapters(*shape), sharp=True, adapted=True)
    for layer in (module for module in policy.model.modules() if isinstance(module, LoRALinear)):
        layer.fused = fused
    sampler, before = Sampler(policy, Limits(rows=8, kept_gib=1.0)), numbers(policy)
    prompts = [policy.prompt_ids(({"role": "user", "content": question},)) for question in ("7+5=?", "1")]
    sampling = Sampling(samples=4, temperature=1.0, max_tokens=20, seed=11)

    @torch.inference_mode()
    def sampled() -> list[list[int]]:
        found = sampler.decode(prompts, sampling, list(range(8)))
        wanted = hf_reference.decode(policy, prompts, sampling, list(range(8)))
        sampler.sleep()
        assert [one[0] for one in found] == [one[0] for one in wanted]
        for one, other in zip(found, wanted, strict=True):
            assert one[1] == pytest.approx(other[1], abs=5e-5)
        return [one[0] for one in found]

    plain, kept = sampled(), sampler.kept
    draws = []
    for step in (1, 2):
        with policy.noise.for_rollout(step, 0):
            draws.append(sampled())
        assert sampled() == plain and changed(policy, before) == set()
    assert draws[0] != draws[1] and plain not in draws
    assert sampler.kept is kept is not None


def test_a_base_in_another_format_samples_with_it(make_policy: MakePolicy, make_experiment: MakeExperiment) -> None:
    words = on_adapters("rollout.quant=nvfp4")
    experiment, policy = make_experiment("quant=bf16", *words), make_policy(*words, quant="bf16", adapted=True)
    with on_base_of(experiment.sampled, "rollout.quant", experiment, policy, experiment.engine.build(policy)) as (
        copied,
        _,
    ):
        clean = logprobs(copied)
        with policy.noise.for_rollout(1, 0):
            assert (logprobs(copied) - clean).abs().max() > 1e-3
        assert torch.equal(logprobs(copied), clean)


def test_the_copy_in_vllm_is_old_as_long_as_it_lacks_the_noise(make_policy: MakePolicy, tmp_path: Path) -> None:
    policy: Any = make_policy(*on_adapters(), adapted=True)
    mirror = Mirror(None, policy, tmp_path)
    mirror.scales, mirror.adapter = clone(mirror.clean), clone(policy.adapter_state())
    assert mirror.current
    with policy.noise.for_rollout(1, 0):
        assert not mirror.current
    assert mirror.current


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_noisy_training_pass_has_the_gradient_of_the_noisy_adapter(make_policy: MakePolicy, recompute: str) -> None:
    """Backward in a context of its own, as `update` does it."""
    policy = make_policy(*on_adapters(f"train.recompute={recompute}"), sharp=True, adapted=True)
    other = copy.deepcopy(policy)
    before = numbers(policy)
    with policy.noise.for_rollout(1, 0):
        other.model.load_state_dict(policy.model.state_dict())
    policy.train_mode(True)
    with policy.noise.for_training():
        loss = policy.token_stats(IDS, MASK, 1.0).logprobs[MASK].sum()
    with policy.noise.for_training():
        loss.backward()
    expected = other.token_stats(IDS, MASK, 1.0).logprobs[MASK].sum()
    expected.backward()
    assert torch.equal(loss, expected) and changed(policy, before) == set()
    for one, wanted in zip(policy.trainable, other.trainable, strict=True):
        assert one.grad is not None and wanted.grad is not None and torch.equal(one.grad, wanted.grad)


def test_no_norm_is_said_to_have_noise(make_policy: MakePolicy) -> None:
    found = check_sites(make_policy(*on_adapters()))
    assert found["norms_with_noise"] == {} and len(found["norms_without_noise"]) == 5


# --- what is refused, and what stays as it was -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("noise.where=weights",), "noise.where must be one of norms, adapters"),
        (
            ("noise.where=adapters", "lora=none", "quant=bf16"),
            "lora=none has none. Use lora=default, or noise.where=norms",
        ),
        (
            ("noise.where=adapters", "noise.norms=missed"),
            "noise.norms=missed, which is about norms. Leave noise.norms out",
        ),
        (
            ("noise.where=adapters", "noise.routers=false", "noise.accumulate=all"),
            "noise.routers=False, noise.accumulate=all, which is about norms",
        ),
        (("noise.where=adapters", "recipe=repo", "aqn=exp"), "noise.norms=blocks_final, noise.accumulate=final"),
        (("noise.where=adapters", "aqn=layerwise"), "aqn=layerwise divides its noise among norms"),
        (
            ("noise.where=adapters", "aqn=format_error", "quant=bf16"),
            "aqn=format_error divides .*Use noise.where=norms",
        ),
    ],
)
def test_what_cannot_act_is_refused(make_experiment: MakeExperiment, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_experiment(*words)


def test_runs_from_before_the_option_keep_their_names_and_go_on(
    make_config: Callable[..., Any], tmp_path: Path
) -> None:
    now = make_config("aqn=exp")
    tree = as_dict(copy.deepcopy(now))
    del tree["noise"]["where"]
    assert fingerprint(tree) == fingerprint(now) != fingerprint(make_config("aqn=exp", "noise.where=adapters"))
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(tree))
    refuse_other_config(tmp_path, now, "")
    with pytest.raises(ConfigError, match=r"noise\.where is None there and 'adapters' here"):
        refuse_other_config(tmp_path, {**as_dict(now), "noise": {**as_dict(now)["noise"], "where": "adapters"}}, "")
    assert with_later_keys(tree)["noise"] == as_dict(now)["noise"]
