"""Models with which a run was once silently wrong, or crashed: each is right now, and a check refuses it if it is not.

A check is tested by taking out the cure: it must then name the key that helps.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_bench.config import build, compose
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model import preflight as checks
from qerl_bench.model.policy import Policy
from qerl_bench.model.preflight import preflight
from qerl_bench.model.structure import Structure, structure_of
from qerl_bench.model_setup import build_policy
from qerl_bench.run_setup import set_up
from qerl_bench.train.batch import make_batch
from qerl_bench.train.update import make_optimizer, update
from qerl_core.checks import ConfigError
from qerl_core.rundir.run_dir import RunDir
from tests.models import builds

WORDS = (*builds.WORDS, "aqn=constant")
SIGMA = 0.01  # of aqn=constant


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Experiment]:
    """experiment("gemma2", "aqn=none"): a run of a tiny random checkpoint, written once."""
    folder = tmp_path_factory.mktemp("checkpoints")
    checkpoint = functools.cache(lambda name: builds.build(name, folder / name))

    @functools.cache
    def make(name: str, *words: str) -> Experiment:
        return build(compose([*WORDS, f"model.id={checkpoint(name)}", f"root={folder}", *words]))

    return make


@pytest.fixture(scope="module")
def policy(experiment: Callable[..., Experiment]) -> Callable[..., Policy]:
    return lambda name, *words: build_policy(experiment(name, *words), None, "cpu")


def check(policy: Policy, experiment: Experiment) -> dict[str, Any]:
    return preflight(policy, experiment.quant, "model=M")


# --- noise: the norms that feed layers, and their scale --------------------------------------------------------------

SITES = {
    "qwen2": ("input_layernorm", "post_attention_layernorm"),
    "gemma2": ("input_layernorm", "pre_feedforward_layernorm"),
    "gemma3": ("input_layernorm", "pre_feedforward_layernorm"),
    "gemma4_text": ("input_layernorm", "pre_feedforward_layernorm"),
    "apertus": ("attention_layernorm", "feedforward_layernorm"),
    "lfm2": ("operator_norm", "ffn_norm"),
    "cohere2": ("input_layernorm",),
    "deepseek_v3": ("input_layernorm", "post_attention_layernorm"),  # and none of MLA's
    "qwen3_5_text": ("input_layernorm", "post_attention_layernorm"),  # and none of linear attention's
}


@pytest.mark.parametrize("name", SITES)
def test_noise_is_on_the_norms_that_feed_layers(policy: Callable[..., Policy], name: str) -> None:
    """All of them and no other, block by block; the final norm is known too."""
    noisy = policy(name, "noise.norms=blocks_final").noise.norms
    *blocks, final = noisy
    leaves = [norm.rpartition(".")[2] for norm in blocks]
    assert leaves == list(SITES[name]) * 2
    assert ".layers." not in final


def test_noise_on_a_norm_that_feeds_nothing_is_refused(policy: Callable[..., Policy], experiment: Any) -> None:
    """As it was: Gemma's post_attention_layernorm scales what attention adds to the residual stream."""
    gemma = policy("gemma2")
    assert set(check(gemma, experiment("gemma2"))["norms_with_noise"]) == set(gemma.noise.norms)
    site = gemma.structure.sites[1]
    wrong = site.name.replace("pre_feedforward", "post_attention")
    gemma.structure = replace(gemma.structure, sites=(replace(site, name=wrong),))
    gemma.noise.norms = {wrong: gemma.model.get_submodule(wrong)}
    with pytest.raises(ConfigError, match=r"post_attention_layernorm .*in training it feeds nothing.* aqn=none"):
        check(gemma, experiment("gemma2"))


@pytest.mark.parametrize(
    ("name", "offset"), [("gemma2", 1.0), ("qwen3_5_text", 1.0), ("nemotron", 1.0), ("llama", 0.0)]
)
def test_relative_noise_is_relative_to_what_the_norm_multiplies_by(
    policy: Callable[..., Policy], name: str, offset: float
) -> None:
    """Scales stored as w near 0 and used as 1 + w: noise relative to w would vanish."""
    noise = policy(name, "noise.relative=true").noise
    assert set(noise.offsets.values()) == {offset}
    norm = next(iter(noise.norms.values()))
    x, bias = torch.randn(512, 64), norm._parameters.get("bias")
    with torch.no_grad():
        clean = norm(x) - (0 if bias is None else bias)
        with noise.for_rollout(1, 0) as report:
            change = norm(x) - (0 if bias is None else bias) - clean
    assert report.sigma_realised == pytest.approx(SIGMA, rel=0.2)
    of_channels = (change * clean).sum(0) / clean.square().sum(0)
    assert float(of_channels.square().mean().sqrt()) == pytest.approx(SIGMA, rel=0.3)


@pytest.mark.parametrize("name", ["olmo2", "exaone4", "nanochat"])
def test_a_model_without_such_norms_trains_without_noise_and_refuses_it_in_words(
    policy: Callable[..., Policy], experiment: Callable[..., Experiment], name: str
) -> None:
    with pytest.raises(ConfigError, match=r"aqn=constant .*have none\. Use noise\.where=adapters, or aqn=none"):
        policy(name)
    assert policy(name, "noise.where=adapters").noise.noisy
    with pytest.raises(ConfigError, match=r"lora\.train_norms=true .*lora\.train_norms=false"):
        policy(name, "aqn=none", "lora.train_norms=true")
    assert check(policy(name, "aqn=none"), experiment(name))["norms_with_noise"] == {}


@pytest.mark.parametrize("name", ["olmo3", "apertus", "lfm2", "nemotron", "starcoder2"])
def test_models_that_crashed_take_a_step(
    policy: Callable[..., Policy], experiment: Callable[..., Experiment], name: str
) -> None:
    """In BF16, with trained norms where there are any: LayerNorm mixes no dtypes."""
    words = ["model.dtype=bfloat16", "algo=sft", "aqn=none", f"lora.train_norms={str(name != 'olmo3').lower()}"]
    trained = policy(name, *words)
    batch = make_batch([[5, 6, 7], [8, 9]], [[1, 2, 3], [4, 5]], trained.pad_id, trained.device)
    no_run: Any = None
    found = update(experiment(name, *words), trained, make_optimizer(trained, experiment(name).optim), batch, no_run, 1)
    assert found["grad_norm"] > 0
    with trained.without_adapter():
        assert trained.token_stats(batch.input_ids, batch.mask, 1.0).logprobs.isfinite().all()


@pytest.mark.parametrize("name", ["nemotron", "starcoder2"])
def test_noise_on_a_layer_norm_with_a_bias_in_bfloat16(policy: Callable[..., Policy], name: str) -> None:
    """Small noise is felt at its true size, and the bias stays what it was."""
    noise = policy(name, "model.dtype=bfloat16", "aqn.level=1e-3").noise
    path, norm = next(iter(noise.norms.items()))
    bias, x = norm.bias, torch.randn(512, 64, dtype=torch.bfloat16)
    assert bias is not None and bias.dtype == torch.bfloat16
    weight = norm.weight.detach().double()  # type: ignore[operator]
    with torch.no_grad():
        clean = norm(x).double()
        with noise.for_rollout(1, 0) as report:
            change, noisy = norm(x), norm.weight.double()  # type: ignore[operator]
            assert change.dtype == torch.bfloat16
    assert report.sigma_realised == pytest.approx(1e-3, rel=0.1)
    expected = (noisy - weight) / (noise.offsets[path] + weight) * (clean - bias.double())
    slope = ((change.double() - clean) * expected).sum() / expected.square().sum()
    assert float(slope) == pytest.approx(1.0, abs=0.2)
    assert norm.bias is bias and norm.weight.dtype == torch.bfloat16


# --- routers ---------------------------------------------------------------------------------------------------------


def test_noise_can_leave_out_norms_that_feed_a_router(policy: Callable[..., Policy]) -> None:
    everywhere, elsewhere = policy("qwen3_moe"), policy("qwen3_moe", "noise.routers=false")
    routed = {site.name for site in everywhere.structure.sites if site.routers}
    assert routed == {f"model.layers.{i}.post_attention_layernorm" for i in range(2)}
    assert set(everywhere.noise.norms) - set(elsewhere.noise.norms) == routed


# --- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"), [("granite", "float32"), ("gemma2", "bfloat16"), ("gemma2", "float32"), ("cohere2", "bfloat16")]
)
def test_what_an_architecture_does_behind_its_head_is_computed_or_refused(
    policy: Callable[..., Policy], experiment: Callable[..., Experiment], name: str, dtype: str
) -> None:
    found = policy(name, "quant=nvfp4", f"model.dtype={dtype}")
    assert check(found, experiment(name, "quant=nvfp4"))["logprob_gap_float32"] < 1e-4
    found.head = found.model.get_output_embeddings()
    remedy = "Use another model" if dtype == "float32" else r"Use model\.dtype=float32, or another model"
    with pytest.raises(ConfigError, match=f"does not compute what model=M computes .* nats or more .*{remedy}"):
        check(found, experiment(name, "quant=nvfp4"))


@pytest.mark.parametrize("broken", [True, False])
def test_kernels_that_compute_something_else_are_refused(
    policy: Callable[..., Policy],
    experiment: Callable[..., Experiment],
    monkeypatch: pytest.MonkeyPatch,
    broken: bool,
) -> None:
    """In the training pass, or without gradient. Rounding alone, in 16 bits as far from FP32 as here, is none."""
    found = policy("gpt_oss", "quant=nvfp4", "model.dtype=bfloat16")
    monkeypatch.setitem(checks.MAX_TOKEN_GAP, "16 bit", 1e-5)
    gaps = check(found, experiment("gpt_oss", "quant=nvfp4"))
    assert 1e-3 < gaps["logprob_gap_tokens_plain"] < 0.2
    assert 0.5 < gaps["logprob_gap_tokens"] / gaps["logprob_gap_tokens_plain"] < 2
    stats = Policy.token_stats

    def wrong(policy: Policy, *args: Any) -> Any:
        found = stats(policy, *args)
        return replace(found, logprobs=found.logprobs - (0.5 if torch.is_grad_enabled() == broken else 0))

    monkeypatch.setattr(Policy, "token_stats", wrong)
    with pytest.raises(ConfigError, match=r"of model=M in torch\.bfloat16 are 0\.[45]\d* nats .*Use kernel=torch"):
        check(found, experiment("gpt_oss", "quant=nvfp4"))


@pytest.mark.parametrize(("name", "packing"), [("seed_oss", True), ("llama", False)])
def test_dropout_of_the_base_is_off_or_refused(
    policy: Callable[..., Policy],
    experiment: Callable[..., Experiment],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    packing: bool,
) -> None:
    """Of the residual stream, and of the attention, which has none with packing."""
    words = ("model.dtype=bfloat16", "lora.dropout=0.3", f"train.packing={packing}")
    found = policy(name, *words)
    assert check(found, experiment(name))["logprob_gap_float32"] < 1e-4
    monkeypatch.setattr(Policy, "train_mode", lambda policy, on: policy.model.train(on))
    with pytest.raises(ConfigError, match="does not compute what model=M computes"):
        check(policy(name, *words), experiment(name))


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
def test_packing_that_mixes_sequences_is_off_or_refused(
    policy: Callable[..., Policy], experiment: Callable[..., Experiment], name: str
) -> None:
    found = policy(name)
    assert not found.packing
    assert check(found, experiment(name))["logprob_gap_float32"] < 1e-4
    found.packing = True
    with pytest.raises(ConfigError, match=r"train\.packing=true mixes .*Use train\.packing=false"):
        check(found, experiment(name))


# --- packing ---------------------------------------------------------------------------------------------------------


def test_adapters_on_16_bit_experts_survive_the_checks(policy: Callable[..., Policy], experiment: Any) -> None:
    """In FP32 the weights of experts must stay parameters: PEFT puts anything else back as a buffer."""
    words = ("quant=bf16", "lora.experts=true", "model.dtype=bfloat16")
    mixture = policy("qwen3_moe", *words)
    assert check(mixture, experiment("qwen3_moe", *words))["logprob_gap_float32"] < 1e-4
    assert not [name for name, _ in mixture.model.named_buffers() if name.endswith("_proj")]


def test_experts_are_packed_or_refused(
    policy: Callable[..., Policy],
    experiment: Callable[..., Experiment],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = "qwen3_moe"
    packed = check(policy(name, "quant=nvfp4"), experiment(name, "quant=nvfp4"))
    assert packed["packed_share"] > 0.98 and all(".mlp." in path for path in packed["unpacked"])
    monkeypatch.setattr("qerl_bench.quantizer.apply.expert_parameters", lambda module: {})
    found = policy(name, "quant=nvfp4")
    with pytest.raises(ConfigError, match=r"quant=nvfp4 packs \d+% .*gate_up_proj \(2\).* quant\.partial=true"):
        check(found, experiment(name, "quant=nvfp4"))
    with caplog.at_level("INFO", "qerl_bench.model.preflight"):
        allowed = check(found, experiment(name, "quant=nvfp4", "quant.partial=true"))
    assert allowed["packed_share"] < 0.5
    assert sum(allowed["unpacked"].values()) > 0 and "stay in 16 bits" in caplog.text


# --- the checks themselves -------------------------------------------------------------------------------------------


def test_checks_leave_no_trace_and_are_recorded(
    experiment: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever eval says, before anything else: weights, hooks, attention and random numbers are as without them."""
    options = experiment("gemma2", "quant=nvfp4", "model.dtype=bfloat16", "lora.dropout=0.1")
    cfg = compose(["device=cpu"])

    def state(folder: Path) -> Any:
        with RunDir(folder, cfg) as run, set_up(options, options.engine, run, "cpu") as setup:
            policy = setup.policy
            modules = dict(policy.model.named_modules())
            return (
                torch.get_rng_state().tolist(),
                {name: tensor.clone() for name, tensor in policy.model.state_dict().items()},
                {name: (module.training, vars(module).keys()) for name, module in modules.items()},
                sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules.values()),
                policy.model.config._attn_implementation,
                {name: parameter.dtype for name, parameter in policy.model.named_parameters()},
            )

    checked = state(tmp_path / "checked")
    record = json.loads((tmp_path / "checked" / "preflight.json").read_text())
    assert record["packed_share"] == 1 and record["routers"] == []
    assert len(record["norms_with_noise"]) == 4 and record["logprob_gap_float32"] < 1e-4
    monkeypatch.setattr("qerl_bench.run_setup.preflight", lambda *_: {})
    unchecked = state(tmp_path / "unchecked")
    assert checked[0] == unchecked[0] and checked[2:] == unchecked[2:]
    assert all(torch.equal(tensor, unchecked[1][name]) for name, tensor in checked[1].items())


def test_a_gap_is_a_quantile_over_tokens_and_vocabulary() -> None:
    logits = torch.zeros(10, 200)
    assert checks.gap_quantile(logits, logits + 3) < 1e-6  # a constant cancels
    other = logits.clone()
    other[0, :3] += torch.tensor([1.0, 2.0, 3.0])
    gaps = (torch.log_softmax(other, -1) - torch.log_softmax(logits, -1)).abs().flatten().sort().values
    assert checks.gap_quantile(other, logits) == gaps[int(0.999 * 2000) - 1]
    other[0, 0] = torch.nan
    assert checks.gap_quantile(other, logits) == torch.inf
    ruled_out = logits.clone()
    ruled_out[:, 5:9] = -torch.inf
    assert checks.gap_quantile(ruled_out, ruled_out) == 0


def test_probing_leaves_no_trace(policy: Callable[..., Policy]) -> None:
    found = policy("qwen3_moe", "quant=nvfp4")
    before = torch.get_rng_state(), {k: v.clone() for k, v in found.model.state_dict().items()}
    again: Structure = structure_of(found.model)  # with its adapter, in the middle of a run
    assert again == found.structure
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(v, before[1][k]) for k, v in found.model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in found.model.modules())
