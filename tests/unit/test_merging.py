"""rollout.merge and train.merge: a layer by hand, what samples and trains with it, runs, an export with its cost."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_bench.commands.export import main as export
from qerl_bench.config import build
from qerl_bench.engine.merged import MergingEngine
from qerl_bench.engine.recordable import eager_reason
from qerl_bench.experiment import rollout_sampling
from qerl_bench.model.block import FusedBlock
from qerl_bench.model.merging import REASON
from qerl_bench.model_setup import build_policy
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quant.packed_checkpoint import read_packed
from qerl_bench.run_setup import on_base_of
from qerl_bench.train.recorded_passes import why_not
from qerl_core.checks import ConfigError
from qerl_core.options.fingerprint import fingerprint, scientific
from qerl_core.rundir.finished_run import without_training
from tests.short_runs import steps_of
from tests.weight_formats import FORMATS

MERGED = ("rollout.merge=true",)
STE = ("rollout.merge=true", "train.merge=ste")
IDS = torch.arange(24).reshape(2, 12) % 97
UP = "model.layers.0.mlp.up_proj"
QKV = tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
formats = pytest.mark.parametrize("name", FORMATS)


def _words(name: str) -> tuple[str, ...]:
    return ("quant.double_quant=true",) if name == "nf4-double" else ()


def _policy(make_policy: Callable[..., Any], name: str, *words: str, **options: Any) -> Any:
    made = {"quant": name.removesuffix("-double"), "width": 64, "adapted": True, "sharp": True}
    return make_policy(*_words(name), *words, **{**made, **options})


def _logprobs(policy: Any) -> torch.Tensor:
    with torch.no_grad():
        return policy.token_stats(IDS, IDS > 0, 1.0).logprobs


def _update(layer: Any) -> torch.Tensor:
    a, b = (layer.get_parameter(f"lora_{name}.default.weight") for name in "AB")
    return (layer.scaling["default"] * (b @ a)).detach()


# --- one layer --------------------------------------------------------------------------------------------------------


@formats
def test_a_layer_multiplies_by_the_rounded_sum_and_gradients_pass_straight_through(
    make_policy: Callable[..., Any], name: str
) -> None:
    policy = _policy(make_policy, name, *STE)
    layer, generator = policy.model.get_submodule(UP), torch.Generator().manual_seed(0)
    x, grad = (torch.randn(5, size, generator=generator) for size in (64, layer.out_features))
    x.requires_grad_()
    parameters = [layer.get_parameter(f"lora_{one}.default.weight") for one in "AB"]
    layer(x).backward(grad)
    apart, x.grad = [parameter.grad.clone() for parameter in parameters], None
    policy.model.zero_grad()

    weights = {path: policy.model.get_submodule(path) for path in (UP, UP.replace("up", "gate"))}
    sums = {path: one.base_layer.dequantized() + _update(one) for path, one in weights.items()}
    amax = max(float(one.abs().max()) for one in sums.values())
    packed = policy.merging.layers()[UP].weight_format.pack(sums[UP], amax)
    by_hand = PackedLinear(layer.base_layer.weight_format, packed, tuple(sums[UP].shape), layer.base_layer.bias)
    with policy.merging.active():
        y = layer(x)
        y.backward(grad)
        with policy.without_adapter():
            assert torch.equal(layer(x), layer.base_layer(x))
    assert torch.equal(y, by_hand(x))
    for parameter, expected in zip(parameters, apart, strict=True):
        torch.testing.assert_close(parameter.grad, expected)
    torch.testing.assert_close(x.grad, grad @ by_hand.dequantized())


def test_what_is_packed_is_made_again_only_for_another_adapter(make_policy: Callable[..., Any]) -> None:
    policy = _policy(make_policy, "nvfp4", *MERGED)
    first = policy.merging.layers()
    assert all(one is policy.merging.layers()[path] for path, one in first.items())
    b = policy.model.get_submodule(QKV[0]).get_parameter("lora_B.default.weight")
    before = b.detach().clone()
    b.data.mul_(2)  # as noise and lag write it, past autograd
    changed = {path for path, one in policy.merging.layers().items() if one is not first[path]}
    assert changed == {*QKV}  # siblings share a tensor scale
    assert len({policy.merging.layers()[path].output_scale for path in QKV}) == 1
    b.data.copy_(before)
    again = policy.merging.layers()
    assert all(torch.equal(again[path].dequantized(), first[path].dequantized()) for path in QKV)


@formats
def test_rounding_keeps_most_of_a_large_update_and_loses_a_small_one(
    make_policy: Callable[..., Any], name: str
) -> None:
    policy = _policy(make_policy, name, *MERGED)
    adapters = [parameter for path, parameter in policy.model.named_parameters() if "lora_B" in path]
    large, merged = policy.merging.update_kept(), policy.merging.layers()
    updates = {path: _update(policy.model.get_submodule(path)) for path in merged}
    for b in adapters:
        b.data.mul_(1e-3)
    assert policy.merging.update_kept() < 0.7 * large
    for b in adapters:
        b.data.zero_()
    assert policy.merging.update_kept() == 1.0
    fresh = policy.merging.layers()
    changes = {path: merged[path].dequantized() - fresh[path].dequantized() for path in merged}
    dot = sum(float((changes[path] * updates[path]).sum()) for path in merged)
    assert large == pytest.approx(dot / sum(float(one.square().sum()) for one in updates.values()), rel=1e-5)
    assert 0.9 < large < 1.1


def test_blocks_in_16_bits_have_the_sum_in_their_dtype(make_policy: Callable[..., Any]) -> None:
    policy = _policy(make_policy, "nvfp4", *MERGED, "quant.keep_first=0.5", "quant.partial=true")
    layer, merged = policy.model.get_submodule(UP), policy.merging.layers()[UP]
    assert not isinstance(merged, PackedLinear)
    assert torch.equal(merged.weight, layer.base_layer.weight + _update(layer))
    assert isinstance(policy.merging.layers()[UP.replace("layers.0", "layers.1")], PackedLinear)


# --- a policy ---------------------------------------------------------------------------------------------------------


@formats
def test_off_nothing_is_merged(make_policy: Callable[..., Any], name: str) -> None:
    policy, plain = _policy(make_policy, name, *MERGED), _policy(make_policy, name)
    assert plain.merging is None and torch.equal(_logprobs(policy), _logprobs(plain))
    with policy.merging.active():
        merged = _logprobs(policy)
    assert not torch.equal(merged, _logprobs(plain)) and torch.equal(_logprobs(policy), _logprobs(plain))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_passes_give_the_same_gradient(make_policy: Callable[..., Any], mode: str) -> None:
    gradients = []
    for recompute in ("none", mode):
        policy = _policy(make_policy, "nvfp4", *STE, f"train.recompute={recompute}")
        policy.train_mode(True)
        with policy.merging.active():
            policy.token_stats(IDS, IDS > 0, 1.0).logprobs.sum().backward()
        gradients.append([parameter.grad.clone() for parameter in policy.trainable])
    assert all(torch.equal(left, right) for left, right in zip(*gradients, strict=True))


def test_the_sampler_alone_merges_and_with_the_noise_of_adapters(
    make_experiment: Callable[..., Any], make_policy: Callable[..., Any], make_noise: Callable[..., Any]
) -> None:
    experiment = make_experiment("quant=nvfp4", "model.hidden_size=64", *MERGED)
    policy = _policy(make_policy, "nvfp4", *MERGED)
    plain = experiment.engine.build(policy)
    engine = MergingEngine(plain, policy.merging)
    prompts, sampling = experiment.task.train_prompts(1, 3, 0), rollout_sampling(experiment, 1)
    merged = engine.generate(prompts, sampling)
    assert not policy.merging.on and plain.generate(prompts, sampling) != merged
    assert engine.generate(prompts, sampling) == merged
    noise = make_noise(policy.norms, 0.5, adapters=policy.noise.adapters)
    with noise.for_rollout(1, 0):
        assert engine.generate(prompts, sampling) != merged
    assert engine.generate(prompts, sampling) == merged
    assert engine.record()["merge"] and 0 < engine.sleep()["merge/update_kept"] < 1.1


def test_from_a_16_bit_trainer_the_sum_is_rounded_once(
    make_experiment: Callable[..., Any], make_policy: Callable[..., Any]
) -> None:
    words = ("quant=bf16", "model.hidden_size=64", "rollout.quant=nvfp4")
    experiment = make_experiment(*words, *MERGED)
    policy = make_policy(*words[2:], *MERGED, quant="bf16", width=64, adapted=True, sharp=True)
    assert policy.merging is None  # the copy samples
    other = make_policy(*words[2:], *STE, quant="bf16", width=64, adapted=True, sharp=True)
    with on_base_of(experiment.sampled, "rollout.quant", experiment, policy, experiment.engine.build(policy)) as (
        copy,
        _,
    ):
        merged, of_trainer = copy.merging.layers(), other.merging.layers()
        assert merged.keys() == of_trainer.keys()
        for path, one in merged.items():
            assert torch.equal(one.dequantized(), of_trainer[path].dequantized())  # in both: the same weights
        layers = {path: policy.model.get_submodule(path) for path in QKV}
        sums = {path: layer.base_layer.weight + _update(layer) for path, layer in layers.items()}
        amax = max(float(one.abs().max()) for one in sums.values())
        packed = merged[QKV[0]].weight_format.pack(sums[QKV[0]], amax)
        assert all(torch.equal(merged[QKV[0]].packed()[key], packed[key]) for key in packed)
        with copy.merging.active(), other.merging.active():
            assert torch.equal(_logprobs(copy), _logprobs(other))


def test_fused_paths_are_refused_with_one_reason(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        policy = make_policy(*MERGED, "kernel=block", quant="nvfp4")
    assert sum("fused blocks and recorded passes are off" in record.getMessage() for record in caplog.records) == 1
    assert not any(isinstance(module.forward, FusedBlock) for module in policy.model.modules())
    policy.fused = True
    assert eager_reason(policy) == REASON
    policy.device = torch.device("cuda")
    assert why_not(make_experiment("quant=nvfp4"), policy) == REASON


@pytest.mark.parametrize(
    ("words", "quant", "message"),
    [
        (("lora.targets=[q_proj,v_proj]", *MERGED), "nvfp4", "lora.targets .*k_proj.*lora.targets=all.*mxfp4"),
        (("lora.targets=[q_proj]", "rollout.quant=mxfp4", *STE), "bf16", "mxfp4.*lora.targets .*lora.targets=all"),
    ],
    ids=["siblings", "layers"],
)
def test_layers_without_an_adapter_are_refused_by_name(
    make_policy: Callable[..., Any], words: tuple[str, ...], quant: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(*words, quant=quant)


def test_a_part_of_the_layers_is_merged_where_no_scale_is_shared(make_policy: Callable[..., Any]) -> None:
    policy = make_policy("lora.targets=[q_proj,v_proj]", *MERGED, quant="mxfp4", adapted=True)
    assert {path.rpartition(".")[2] for path in policy.merging.layers()} == {"q_proj", "v_proj"}


def test_experts_with_adapters_are_refused_by_name(make_experiment: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"rollout.merge=true .*lora.experts=true.*lora.experts=false"):
        make_experiment("quant=nvfp4", "lora.experts=true", *MERGED)


# --- runs -------------------------------------------------------------------------------------------------------------

RUN = ("task=even_characters", "optim.lr=0.05", "model.hidden_size=64", "steps=2")


def _run(make_config: Callable[..., Any], root: Path, name: str, *words: str) -> list[dict[str, Any]]:
    words = (*words, *(() if any(word.startswith("eval") for word in words) else ("eval=none",)))
    return steps_of(make_config, root, name, *RUN, *words)


def test_the_neutral_values_are_those_of_runs_from_before(
    make_config: Callable[..., Any], tmp_path: Path, no_figures: None
) -> None:
    """Names and numbers; a run of quant=nvfp4 of the commit before these keys was compared by hand."""
    neutral = ("rollout.merge=false", "train.merge=none", "rollout.lag=0", "kl.every=0")
    config = scientific(make_config("quant=nvfp4"))
    assert not {"merge", "lag", "every"} & {key for group in ("rollout", "train", "kl") for key in config[group]}
    assert fingerprint(make_config("quant=nvfp4", *neutral)) == fingerprint(make_config("quant=nvfp4"))
    plain = _run(make_config, tmp_path, "plain", "quant=nvfp4")
    assert plain == _run(make_config, tmp_path, "said", "quant=nvfp4", *neutral)
    assert not any(key.startswith(("merge/", "rollout/lag", "kl")) for key in plain[0])


def test_sampler_and_trainer_merge_apart(make_config: Callable[..., Any], tmp_path: Path, no_figures: None) -> None:
    apart, merged, ste = (
        _run(make_config, tmp_path, name, "quant=nvfp4", *words)
        for name, words in (("apart", ()), ("merged", MERGED), ("ste", STE))
    )
    # a fresh adapter adds nothing, and NVFP4 rounds what it has rounded to itself, but for the last bit of its scales
    assert merged[0]["entropy"] == ste[0]["entropy"] == pytest.approx(apart[0]["entropy"], rel=1e-6)
    assert merged[0]["merge/update_kept"] == 1.0 and 0.5 < merged[1]["merge/update_kept"] < 1.1
    gaps = [records[1]["mismatch/kernel_kl"] for records in (apart, merged, ste)]
    assert gaps[1] > 100 * max(gaps[0], gaps[2])
    assert merged[1]["entropy"] == pytest.approx(ste[1]["entropy"], rel=1e-6)  # the first update is the same
    assert merged[1]["entropy"] != pytest.approx(apart[1]["entropy"], rel=1e-6)
    assert merged[1]["grad_norm"] != ste[1]["grad_norm"]
    said = [json.loads((tmp_path / "runs" / name / "engine.json").read_text()) for name in ("apart", "ste")]
    assert ["merge" in one for one in said] == [False, True]
    assert [one["copies_of_weights"] for one in said] == [1, 2]


@formats
def test_every_format_samples_and_trains_merged(
    name: str, make_config: Callable[..., Any], tmp_path: Path, no_figures: None
) -> None:
    words = (f"quant={name.removesuffix('-double')}", *_words(name), "aqn=constant", "quant.activations=int8")
    record = _run(make_config, tmp_path, "run", *words, *STE)[-1]
    assert record["mismatch/kernel_kl"] < 1e-3 and record["grad_norm"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "nf4", "int4"])
def test_a_gpu_samples_and_trains_merged(
    name: str, make_config: Callable[..., Any], tmp_path: Path, no_figures: None
) -> None:
    if name == "nf4":
        pytest.importorskip("bitsandbytes")
    words = (f"quant={name}", "device=cuda", "model.dtype=bfloat16", *STE)
    records = _run(make_config, tmp_path, "run", *words)
    assert all(record["mismatch/kernel_kl"] < 1e-2 and record["grad_norm"] > 0 for record in records)
    assert 0 < records[1]["merge/update_kept"] < 1.1


def test_merged_runs_continue_to_the_same_bits(
    make_config: Callable[..., Any], tmp_path: Path, no_figures: None
) -> None:
    import shutil

    words = ("quant=bf16", "rollout.quant=mxfp4", *STE, "save_every=1")
    straight = _run(make_config, tmp_path, "run", *words)
    folder = tmp_path / "runs" / "run"
    (folder / "done.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step_000002")
    assert _run(make_config, tmp_path, "run", *words) == straight


def test_evaluations_are_of_what_was_trained(make_config: Callable[..., Any], tmp_path: Path, no_figures: None) -> None:
    words = ("quant=bf16", "rollout.quant=nvfp4", *STE, "eval=task", "eval.questions=2", "eval.samples=1")
    _run(make_config, tmp_path, "run", *words)
    records = json.loads((tmp_path / "runs" / "run" / "eval.json").read_text())
    assert {record["settings"]["quant"] for record in records} == {"nvfp4"}
    again = build(without_training(make_config(*words)))
    assert again.merged_into is not None and again.merged_into.name == "nvfp4"
    sampler_alone = build(without_training(make_config(*words[:2], *MERGED)))
    assert sampler_alone.merged_into is None and sampler_alone.rollout.quant is None


# --- an export --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "chosen", "quant"),
    [
        (("quant=nvfp4",), (), "nvfp4"),
        (("quant=nvfp4", "lora.train_norms=true", "model.dtype=bfloat16"), (), "nvfp4"),
        (("quant=int4", "quant.block=32"), (), "int4"),
        (("quant=bf16",), ("checkpoint=1",), "mxfp4"),
        (("quant=bf16", "rollout.quant=fp8", *STE), (), "fp8"),
    ],
    ids=["packed", "trained norms", "other settings", "to a format", "as it sampled"],
)
def test_an_export_has_the_weights_that_the_merged_policy_multiplies_by(
    words: tuple[str, ...],
    chosen: tuple[str, ...],
    quant: str,
    make_config: Callable[..., Any],
    tmp_path: Path,
    no_figures: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _run(make_config, tmp_path, "run", *words, "save_every=1")
    run, out = tmp_path / "runs" / "run", tmp_path / "out"
    export([str(run), f"out={out}", f"quant={quant}", "questions=3", "samples=2", *chosen])
    step = 1 if "checkpoint=1" in chosen else 2
    told = json.loads((out / "merging.json").read_text())
    assert (told["quant"], told["checkpoint"]) == (quant, f"step_{step:06d}")
    assert (told["questions"], told["samples"]) == (3, 2)
    assert {"apart", "merged", "base"} == told["accuracy"].keys()
    assert 0 < told["kl"]["merged"] < told["kl"]["base"] and 0.5 < told["update_kept"] < 1.1
    assert "rounding keeps" in capsys.readouterr().out

    own = () if words[0] != "quant=bf16" else (f"rollout.quant={quant}",)
    experiment = build(make_config(*RUN, *words, *own, *(() if STE[0] in words else STE)))
    policy = build_policy(experiment, None, "cpu")
    policy.load(run / "checkpoints" / f"step_{step:06d}")
    read = read_packed(out, experiment.sampled.quant, policy.model.dtype, "cpu", False)
    for path, layer in policy.merging.layers().items():
        there = read.get_submodule(path)
        assert all(torch.equal(there.packed()[key], tensor) for key, tensor in layer.packed().items())
    with torch.no_grad(), policy.merging.active():
        limit = 1e-5 if policy.model.dtype == torch.float32 else 1e-2  # trained norms are in FP32
        torch.testing.assert_close(read(IDS).logits, policy.model(IDS).logits, rtol=0, atol=limit)


def test_what_cannot_be_exported_is_refused_by_name(
    make_config: Callable[..., Any], tmp_path: Path, no_figures: None
) -> None:
    _run(make_config, tmp_path, "run", "quant=bf16")
    run = str(tmp_path / "runs" / "run")
    for words, message in (
        (("quant=bf16",), "leave quant=bf16 out"),
        (("quant=nvfp4", "samples=0"), "samples must be .*got 0"),
        (("quant=nvfp4", "checkpoint=7"), "checkpoint=7 .*2"),
        (("quant=nvfp4", "steps=3"), "steps is no key.*usage"),
        (("quant=nvfp9",), "rollout.quant must be .*nvfp9"),
    ):
        with pytest.raises(ConfigError, match=message):
            export([run, f"out={tmp_path / 'out'}", *words])
    assert not (tmp_path / "out").exists()


def test_an_experiment_says_what_its_own_policy_merges_into(make_experiment: Callable[..., Any]) -> None:
    assert make_experiment("quant=nvfp4").merged_into is None
    assert make_experiment("quant=nvfp4", *MERGED).merged_into.name == "nvfp4"
    copied = make_experiment("quant=bf16", "rollout.quant=nvfp4", *MERGED)
    assert copied.merged_into is None and copied.sampled.merged_into.name == "nvfp4"
    both = replace(copied, train=replace(copied.train, merge="ste"))
    assert both.merged_into.name == both.sampled.merged_into.name == "nvfp4"
