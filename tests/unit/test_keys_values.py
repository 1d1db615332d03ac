"""rollout.kv, train.kv and eval.kv: what is rounded where, against other libraries and by hand, and runs in which
trainer, sampler and evaluations round apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qerl_bench.config import build, compose
from qerl_bench.engine.hf_reference import cache_name, cache_of, prefill
from qerl_bench.engine.kv_check import kv_check
from qerl_bench.engine.recordable import eager_reason
from qerl_bench.engine.vllm.engine import VLLMEngine
from qerl_bench.model.attention import attention
from qerl_bench.model.block import FusedBlock, fuse_blocks
from qerl_bench.model.keys_values import ATTRIBUTE, REASON, KVRounding, RoundedCache
from qerl_bench.model.lm_head import decoder_of
from qerl_bench.model.rounded import unrounded
from qerl_bench.model_setup import build_policy
from qerl_bench.quant.base import KEYS_AND_VALUES
from qerl_bench.quant.kv_kinds import Kinds, kinds_of
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.train.recorded_passes import why_not
from qerl_core.checks import ConfigError
from qerl_core.options.fingerprint import fingerprint, scientific
from qerl_kernels import training_block_reference
from qerl_kernels.activations import fallen_back, round_blocks
from tests.models import builds
from tests.short_runs import steps_of

ROUNDED = tuple(kind for kind in KEYS_AND_VALUES if kind != "none")
kinds = pytest.mark.parametrize("kind", ROUNDED)
IDS = torch.arange(24).reshape(2, 12) % 97
CPU = torch.device("cpu")


def _on(kind: str) -> KVRounding:
    return KVRounding(Kinds(kind, kind, kind), CPU)


def _heads(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (2, 3, 5, 64) of tokens of very different size, one with an outlier."""
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(2, 3, 5, 64, generator=generator) for _ in range(2))
    key *= torch.logspace(-3, 2, 5)[:, None]
    key[1, 2, 3, 9] = 500.0
    return key.to(dtype), value.to(dtype)


# --- the values -------------------------------------------------------------------------------------------------------


def _torchao(x: torch.Tensor, kind: str) -> torch.Tensor:
    """x (N, D), each row with its own scales, by the classes of torchao."""
    if kind == "nvfp4":
        module = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
        scale = module.per_tensor_amax_to_scale
        rows = [module.NVFP4Tensor.to_nvfp4(row[None], per_tensor_scale=scale(row.abs().max())) for row in x]
        return torch.cat([row.dequantize(x.dtype) for row in rows])
    row = pytest.importorskip("torchao.quantization.granularity").PerRow()
    workflows = "torchao.quantization.quantize_.workflows"
    if kind == "fp8":
        theirs = pytest.importorskip(f"{workflows}.float8.float8_tensor").Float8Tensor.from_hp(x, granularity=row)
    else:
        theirs = pytest.importorskip(f"{workflows}.int8.int8_tensor").Int8Tensor.from_hp(x, row)
    return theirs.dequantize()


@pytest.mark.peers
@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_is_written_are_torchao_s_values_of_each_token_and_head(kind: str, dtype: torch.dtype) -> None:
    for x, found in zip(_heads(dtype), _on(kind)(*_heads(dtype)), strict=True):
        expected = _torchao(x.reshape(-1, 64), kind).view(x.shape)
        torch.testing.assert_close(found, expected, rtol=1e-6 if kind == "nvfp4" else 0, atol=0)
        assert not torch.equal(found, x)


@kinds
def test_no_other_token_or_head_changes_what_is_written(kind: str) -> None:
    key, value = _heads()
    whole, _ = _on(kind)(key, value)
    alone, _ = _on(kind)(key[1:, 2:, 3:4], value[1:, 2:, 3:4])
    assert torch.equal(alone, whole[1:, 2:, 3:4])


@kinds
def test_gradients_pass_straight_through(kind: str) -> None:
    key, value = (x.requires_grad_() for x in _heads())
    found = _on(kind)(key, value)
    sum((x * torch.arange(64.0)).sum() for x in found).backward()  # type: ignore[union-attr]
    for x in (key, value):
        assert torch.equal(x.grad, torch.arange(64.0).expand(x.shape))  # type: ignore[arg-type]


@kinds
def test_scales_that_fall_back_and_numbers_that_are_lost_are_counted(kind: str) -> None:
    """A token of zeros and, in two formats, one too small for a scale of its own, against a count by hand."""
    key, value = _heads()
    key[0, 1, 2] = 0
    value[1, 0, 0] = 1e-44  # over 448 or 2688 it is 0; for int8 it is below the epsilon too
    rounding = _on(kind)
    found = rounding(key, value)
    lost = sum(int(((a == 0) & (b != 0)).sum()) for a, b in zip(found, (key, value), strict=True))
    numbers = sum(int((x != 0).sum()) for x in (key, value))
    assert rounding.take() == {"kv/underflow": (lost, numbers), "kv/scale_fallback": (2, 60)}
    assert rounding.take() == {"kv/underflow": (0, 0), "kv/scale_fallback": (0, 0)}
    assert lost >= 64


def test_a_scale_falls_back_where_the_arithmetic_of_the_format_says_so() -> None:
    """In FP16 the largest magnitude over 448 is 0 from 1.3e-5 down: all else there is rounded by a scale of 1e-3."""
    x = torch.tensor([[2e-5, 1e-6], [1e-5, 1e-6], [1.0, 0.5]], dtype=torch.float16)
    assert int(fallen_back(x, "fp8")) == 1
    errors = ((round_blocks(x, "fp8") - x).abs() / x).float().amax(1)
    assert errors[1] > 0.05 > errors[2]


# --- where it happens -------------------------------------------------------------------------------------------------


def _logprobs(policy: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of all tokens in a pass of training (B, T, V)."""
    with torch.no_grad():
        return torch.log_softmax(policy.model(input_ids=ids, use_cache=False).logits.float(), -1)


def _decoded(policy: Any, ids: torch.Tensor) -> torch.Tensor:
    """The same, written to the cache token by token after the first five."""
    cache, logits = cache_of(policy), []
    with torch.inference_mode(), policy.kv.sampling(at_pages=True):
        for at in (slice(0, 5), *(slice(t, t + 1) for t in range(5, ids.shape[1]))):
            options: dict[str, Any] = {cache_name(policy): cache, "use_cache": True}
            positions = torch.arange(at.start, at.stop)[None].expand(len(ids), -1)
            logits.append(policy.model(input_ids=ids[:, at], position_ids=positions, **options).logits)
    return torch.log_softmax(torch.cat(logits, 1).float(), -1)


ARCHITECTURES = ("llama", "mistral", "qwen3", "phi3", "gemma2", "gemma3_text", "gpt_oss", "gemma4_text", "qwen3_next")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_training_attends_to_what_sampling_writes(architecture: str, tmp_path: Path) -> None:
    """Windows, sinks, soft caps, shared keys, and linear attention beside it: one function rounds the same."""
    folder = builds.build(architecture, tmp_path / architecture)
    words = (*builds.WORDS, f"model.id={folder}", "task=even_characters", "task.template=chat", "quant=bf16")
    policy = build_policy(build(compose([*words, "train.kv=nvfp4"])), None, "cpu")
    checked = kv_check(policy, "the model")
    with_keys = sum(hasattr(layer, "keys") for layer in cache_of(policy).layers)
    assert checked == {"kv_layers": with_keys} and with_keys >= 1
    trained = _logprobs(policy, IDS)
    torch.testing.assert_close(_decoded(policy, IDS), trained, rtol=0, atol=2e-3)
    with unrounded(policy):
        plain = _logprobs(policy, IDS)
        torch.testing.assert_close(_decoded(policy, IDS), plain, rtol=0, atol=2e-3)
    assert (trained - plain).abs().max() > 0.02


def test_keys_are_rounded_after_their_rotation_and_only_then(make_policy: Callable[..., Any]) -> None:
    """Of the first layer, whose input no rounding reaches."""
    policy = make_policy("train.kv=nvfp4", quant="bf16", adapted=True)
    with policy.kv.sampling(at_pages=True):
        rounded = prefill(policy, [IDS[0].tolist()]).cache.layers[0]
        with unrounded(policy):
            plain = prefill(policy, [IDS[0].tolist()]).cache.layers[0]
    for found, given in ((rounded.keys, plain.keys), (rounded.values, plain.values)):
        assert torch.equal(found, round_blocks(given, "nvfp4")) and not torch.equal(found, given)
    projected = policy.model.model.layers[0].self_attn.k_proj(policy.model.model.layers[0].input_layernorm(
        policy.model.model.embed_tokens(IDS[:1])))  # fmt: skip
    assert torch.equal(plain.keys[0, :, 0], projected[0, 0].view(1, 16))  # the first position is not rotated
    assert not torch.allclose(plain.keys[0, :, 5], projected[0, 5].view(1, 16))


def test_each_kind_of_pass_has_its_own(make_policy: Callable[..., Any]) -> None:
    policy = make_policy("train.kv=fp8", "rollout.kv=nvfp4", "eval.kv=none", quant="bf16", sharp=True)
    arms = {kind: make_policy(f"train.kv={kind}", quant="bf16", sharp=True) for kind in KEYS_AND_VALUES}
    assert torch.equal(_logprobs(policy, IDS), _logprobs(arms["fp8"], IDS))
    assert torch.equal(_decoded(policy, IDS), _decoded(arms["nvfp4"], IDS))
    with policy.kv.sampling(at_pages=False):
        assert torch.equal(_logprobs(policy, IDS), _logprobs(arms["nvfp4"], IDS))
    with policy.kv.answering():
        assert torch.equal(_logprobs(policy, IDS), _logprobs(arms["none"], IDS))
        assert torch.equal(_decoded(policy, IDS), _decoded(arms["none"], IDS))
    assert torch.equal(_logprobs(policy, IDS), _logprobs(arms["fp8"], IDS))
    assert not torch.equal(_logprobs(arms["none"], IDS), _logprobs(arms["fp8"], IDS))


def test_packed_padded_recomputed_and_written_out_passes_round_alike(make_policy: Callable[..., Any]) -> None:
    passes = {
        "packed": ("train.packing=true",),
        "padded": ("train.packing=false",),
        "recomputed": ("train.recompute=full",),
        "selective": ("train.recompute=selective",),
        "written out": (),
    }
    found, mask = {}, IDS.new_ones(IDS.shape, dtype=torch.bool)
    mask[:, :4] = mask[1, 9:] = False
    for name, words in passes.items():
        policy = make_policy("train.kv=nvfp4", *words, quant="bf16", sharp=True, adapted=True)
        if name == "written out":
            assert fuse_blocks(decoder_of(policy.model), training_block_reference) is None
            assert isinstance(policy.model.model.layers[0].forward, FusedBlock)
        policy.train_mode(True)
        logprobs = policy.token_stats(IDS, mask, 1.0).logprobs
        logprobs[mask].sum().backward()
        assert policy.kv.take()["kv/underflow"][0] > 0
        found[name] = logprobs[mask].detach(), [parameter.grad for parameter in policy.trainable]
    for name in passes:
        torch.testing.assert_close(found[name], found["packed"], rtol=1e-3, atol=2e-4)
    plain = make_policy(quant="bf16", sharp=True, adapted=True).token_stats(IDS, mask, 1.0).logprobs[mask]
    assert (plain - found["packed"][0]).abs().max() > 0.01


def test_nothing_is_there_unless_it_is_asked_for(make_policy: Callable[..., Any]) -> None:
    policy = make_policy("rollout.kv=none", "eval.kv=none", quant="bf16")
    assert not any(hasattr(module, ATTRIBUTE) for module in policy.model.modules())
    assert not isinstance(cache_of(policy), RoundedCache) and kv_check(policy, "the model") == {}


def test_recorded_paths_are_left_for_one_reason(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any]
) -> None:
    found = {}
    for words in ("train.kv=fp8 rollout.kv=none eval.kv=none", "rollout.kv=fp8", "eval.kv=fp8", "train.kv=none"):
        policy = make_policy(*words.split(), quant="nvfp4")
        policy.fused, policy.device = True, torch.device("cuda")
        for module in policy.model.modules():
            if isinstance(module, PackedLinear):
                module.use_kernels()
        found[words.split()[0]] = eager_reason(policy), why_not(make_experiment("quant=nvfp4"), policy)
    assert found["train.kv=fp8"] == (None, REASON)
    assert found["rollout.kv=fp8"] == found["eval.kv=fp8"] == (REASON, found["train.kv=none"][1])
    assert found["train.kv=none"][0] is None and found["train.kv=none"][1] != REASON


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_model_that_keeps_states_instead_of_keys_is_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("mamba", vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8)
    model = AutoModelForCausalLM.from_config(config)
    kv = _on("fp8")
    policy: Any = SimpleNamespace(model=model, kv=kv, device=CPU, pad_id=0)
    with pytest.raises(ConfigError, match=r"train.kv=fp8 .*model=m writes none.*states.*Use train.kv=none"):
        kv_check(policy, "model=m")


def test_layers_that_attend_by_a_function_of_their_own_are_refused_in_training(make_policy: Any) -> None:
    policy = make_policy("train.kv=fp8", quant="bf16")
    decoder_of(policy.model).set_attn_implementation("eager")
    match = r"train.kv=fp8 .* 2 of the 2 layers of model=m .*Use train.kv=none"
    with pytest.raises(ConfigError, match=match):
        kv_check(policy, "model=m")
    policy = make_policy("rollout.kv=fp8", quant="bf16")
    decoder_of(policy.model).set_attn_implementation("eager")
    assert kv_check(policy, "model=m") == {"kv_layers": 2}  # the cache is what samples, and rounds


@pytest.mark.parametrize("key", ["train.kv", "rollout.kv", "eval.kv"])
def test_keys_without_a_finite_scale_are_refused_before_the_first_step(make_policy: Any, key: str) -> None:
    words = {"train.kv": ("rollout.kv=none", "eval.kv=none")}.get(key, ())
    policy = make_policy(f"{key}=nvfp4", *words, quant="bf16")
    with torch.no_grad():
        policy.model.model.layers[1].self_attn.k_proj.weight[3] = torch.inf
    with pytest.raises(ConfigError, match=rf"{key}=nvfp4 .*the keys of layer 1 of model=m are NaN or inf.*{key}=none"):
        kv_check(policy, "model=m")
    policy.model.model.layers[1].self_attn.k_proj.weight.data[3] = 0
    assert kv_check(policy, "model=m") == {"kv_layers": 2}


def test_a_head_that_only_the_model_knows_is_refused_by_its_width(make_policy: Any) -> None:
    policy = make_policy("rollout.kv=fp8", "model.heads=4", "model.kv_heads=4", quant="bf16")
    policy.kv.kinds = Kinds("none", "nvfp4", "none")
    match = r"rollout.kv=nvfp4 .*16 numbers.*the keys of layer 0 of model=m, 8 wide. Use rollout.kv=fp8"
    with pytest.raises(ConfigError, match=match):
        kv_check(policy, "model=m")


def test_a_model_that_writes_latents_is_refused(tmp_path: Path) -> None:
    folder = builds.build("deepseek_v3", tmp_path / "mla")
    words = (*builds.WORDS, f"model.id={folder}", "task=even_characters", "task.template=chat", "quant=bf16")
    policy = build_policy(build(compose([*words, "rollout.kv=fp8"])), None, "cpu")
    with pytest.raises(ConfigError, match=r"rollout.kv=fp8 .*model=m writes something else, such as latents.* 0, 1"):
        kv_check(policy, "model=m")


def test_vllm_gets_its_own_name_of_the_cache_on_a_gpu_alone(make_policy: Any, make_experiment: Any) -> None:
    engine: Any = VLLMEngine.__new__(VLLMEngine)
    engine.options = make_experiment("engine=vllm", "quant=bf16").engine
    engine.max_model_len = 64
    expected = {"none": None, "fp8": "fp8_per_token_head", "int8": "int8_per_token_head"}
    for kind, name in expected.items():
        engine.policy, engine.on_gpu = make_policy(f"rollout.kv={kind}", quant="bf16"), True
        assert engine._vllm_options().get("kv_cache_dtype") == name
        engine.on_gpu = False
        if name is None:
            engine._vllm_options()
            continue
        with pytest.raises(ConfigError, match=rf"rollout.kv={kind}.*on a GPU alone.*engine=hf"):
            engine._vllm_options()


# --- runs -------------------------------------------------------------------------------------------------------------

WORDS = ("task=even_characters", "optim.lr=0.05", "steps=2", "quant=bf16")


def _run(make_config: Callable[..., Any], root: Path, name: str, *words: str) -> list[dict[str, Any]]:
    return steps_of(make_config, root, name, *WORDS, *words)


def _record(root: Path, name: str, file: str) -> Any:
    return json.loads((root / "runs" / name / file).read_text())


def test_off_is_what_runs_were_before(make_config: Callable[..., Any]) -> None:
    cfg = make_config("quant=mxfp4")
    assert not any("kv" in scientific(cfg)[group] for group in ("train", "rollout", "eval"))
    off = ("train.kv=none", "rollout.kv=null", "eval.kv=null")
    assert fingerprint(make_config("quant=mxfp4", *off)) == fingerprint(cfg)
    for on in ("train.kv=fp8", "rollout.kv=fp8", "rollout.kv=none", "eval.kv=fp8"):
        assert fingerprint(make_config("quant=mxfp4", on)) != fingerprint(cfg)


def test_trainer_and_sampler_round_apart(make_config: Callable[..., Any], tmp_path: Path, no_figures: None) -> None:
    """Arms of both: what each metric sees, and that the gap is there where one rounds, and gone where both do."""
    found = {}
    for trainer, sampler in (("none", "none"), ("none", "nvfp4"), ("nvfp4", "none"), ("nvfp4", "null")):
        words = (f"train.kv={trainer}", f"rollout.kv={sampler}", "eval=none")
        found[trainer, sampler] = _run(make_config, tmp_path, f"{trainer}-{sampler}", *words)
    for (trainer, sampler), records in found.items():
        sampler = trainer if sampler == "null" else sampler
        for record in records:
            assert ("kv/underflow" in record) == ("kv/scale_fallback" in record) == (trainer != "none")
            assert ("kv/underflow_rollout" in record) == (sampler != "none")
            assert all(0 < record[key] < 0.5 for key in record if key.startswith("kv/underflow"))
    parted = [found["none", "nvfp4"][0]["mismatch/kl"], found["nvfp4", "none"][0]["mismatch/kl"]]
    together = [found["none", "none"][0]["mismatch/kl"], found["nvfp4", "null"][0]["mismatch/kl"]]
    assert min(parted) > 1000 * max(together)
    assert found["none", "nvfp4"][0]["entropy"] == found["nvfp4", "null"][0]["entropy"]
    plain, one = (_record(tmp_path, name, "engine.json") for name in ("none-none", "nvfp4-null"))
    assert "kv" not in plain and one["kv"] == {"train": "nvfp4", "rollout": "nvfp4", "eval": "nvfp4"}
    plain, one = (_record(tmp_path, name, "preflight.json") for name in ("none-none", "nvfp4-null"))
    assert "kv_layers" not in plain and one["kv_layers"] == 2


def test_evaluations_round_by_themselves_and_say_so(
    make_config: Callable[..., Any], tmp_path: Path, no_figures: None
) -> None:
    words = ("eval=task", "eval.questions=4", "eval.samples=2")
    for name, kind in {"plain": "null", "nvfp4": "nvfp4"}.items():
        _run(make_config, tmp_path, name, *words, f"eval.kv={kind}")
    text = {name: json.dumps(_record(tmp_path, name, "eval.json")) for name in ("plain", "nvfp4")}
    assert '"kv": {"eval": "nvfp4"}' in text["nvfp4"] and '"kv"' not in text["plain"]
    steps = [(tmp_path / "runs" / name / "rollouts.jsonl").read_text() for name in ("plain", "nvfp4")]
    assert steps[0] == steps[1]  # what is trained on is the same


def test_another_base_that_samples_rounds_as_the_run_says(
    make_config: Callable[..., Any], tmp_path: Path, no_figures: None
) -> None:
    words = ("rollout.quant=nvfp4", "eval=none")
    both = {kind: _run(make_config, tmp_path, kind, *words, f"rollout.kv={kind}") for kind in ("none", "nvfp4")}
    gaps = {kind: records[0]["mismatch/kl"] for kind, records in both.items()}
    assert gaps["nvfp4"] > gaps["none"] > 0 and "kv/underflow_rollout" in both["nvfp4"][0]


def test_kinds_follow_training_unless_they_say_otherwise(make_experiment: Any) -> None:
    assert kinds_of(make_experiment("train.kv=fp8")) == Kinds("fp8", "fp8", "fp8")
    assert kinds_of(make_experiment("train.kv=fp8", "rollout.kv=none", "eval.kv=int8")) == Kinds("fp8", "none", "int8")
    assert kinds_of(make_experiment("rollout.kv=int8", "eval=none")) == Kinds("none", "int8", "none")


def test_attention_without_the_mark_is_untouched() -> None:
    query, (key, value) = torch.ones(2, 3, 5, 64), _heads()
    module = torch.nn.Module()
    module.num_key_value_groups = 1  # type: ignore[assignment]
    module.is_causal = True  # type: ignore[assignment]
    plain, _ = attention(module, query, key, value, None)
    setattr(module, ATTRIBUTE, _on("int8"))
    rounded, _ = attention(module, query, key, value, None)
    by_hand, _ = attention(torch.nn.Module(), query, round_blocks(key, "int8"), round_blocks(value, "int8"), None)
    assert torch.equal(rounded, by_hand) and not torch.equal(rounded, plain)
    with ExitStack() as stack:
        stack.enter_context(getattr(module, ATTRIBUTE).sampling(at_pages=True))
        assert torch.equal(attention(module, query, key, value, None)[0], plain)  # it was rounded when written
