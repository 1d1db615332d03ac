"""The step over fixed buffers: it samples what transformers samples, and a replay is what it was recorded from."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from qerl_bench.engine import hf, hf_graph, hf_reference
from qerl_bench.engine.base import Sampling
from qerl_bench.engine.decoder_blocks import kv_bytes
from qerl_bench.engine.recordable import eager_reason
from qerl_bench.engine.rollout_queue import Limits
from qerl_bench.engine.sampler import Sampler, decode
from qerl_bench.model import kernels
from qerl_bench.model.kernels import LoRALinear, adapters_cast_to, fuse_linears
from qerl_bench.model.policy import Policy
from qerl_bench.quant.concat import concat_rows_in_place
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.train.batch import make_batch
from qerl_core.checks import ConfigError
from qerl_core.metrics.definitions import ENGINE_HF
from qerl_core.records import Prompt
from tests.failing import failing

QUESTIONS = ("7+5=?", "1", "one token for each letter of a longer question: 12+34-5=?", "19-3+4=?", "")
SAMPLES = 4
KEYS = list(range(100, 100 + len(QUESTIONS) * SAMPLES))
MakePolicy = Callable[..., Policy]


def _sampling(**changed: Any) -> Sampling:
    return Sampling(**{"samples": SAMPLES, "temperature": 1.0, "max_tokens": 40, "seed": 11, **changed})


def _ragged(policy: Policy) -> Policy:
    """Stops at one token in twelve, so that rows end at different times."""
    policy.stop_ids = frozenset({*policy.stop_ids, *range(3, 262, 12)})
    return policy


def _prompts(policy: Policy) -> list[list[int]]:
    return [policy.prompt_ids(({"role": "user", "content": question},)) for question in QUESTIONS]


@torch.inference_mode()
def _decoded(
    how: Callable[..., Any], policy: Policy, sampling: Sampling, **options: Any
) -> list[hf_reference.Completion]:
    return how(policy, _prompts(policy), sampling, KEYS, **options)


def _same(found: list[hf_reference.Completion], wanted: list[hf_reference.Completion], tolerance: float) -> None:
    assert [one[0] for one in found] == [other[0] for other in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one[1] == pytest.approx(other[1], abs=tolerance)
        assert one[2] == pytest.approx(other[2], abs=tolerance)


def _same_but_for_flips(found: list[hf_reference.Completion], wanted: list[hf_reference.Completion]) -> None:
    """The last bit of an input decides in one token of a hundred at most to which of two codes it is rounded."""
    _same(found, wanted, 0.02)
    pairs = [pair for one, other in zip(found, wanted, strict=True) for pair in zip(one[1], other[1], strict=True)]
    assert sum(abs(one - other) > 5e-5 for one, other in pairs) <= 0.01 * len(pairs)


# --- against sampling through transformers ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy(make_policy: MakePolicy) -> Policy:
    return _ragged(make_policy("model.heads=4", "model.kv_heads=2", sharp=True, adapted=True))


@pytest.fixture(scope="module")
def wanted(policy: Policy) -> list[hf_reference.Completion]:
    """What transformers samples: completions of one token up to the limit of 40."""
    found = _decoded(hf_reference.decode, policy, _sampling())
    lengths = [len(ids) for ids, _, _ in found]
    assert min(lengths) < 3 and max(lengths) > 20 and len(set(lengths)) > 6
    return found


@pytest.mark.parametrize(("rows", "check_every"), [(20, 1), (20, 16), (7, 5), (1, 40)])
def test_completions_are_those_of_transformers(
    policy: Policy,
    wanted: list[hf_reference.Completion],
    rows: int,
    check_every: int,
    listen: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ragged prompts and ends, in batches that are refilled and shrink; groups that are cut by the batch."""
    monkeypatch.setattr(hf_graph, "CHECK_STOP_EVERY", check_every)
    steps = listen(hf_graph.Decoding, "_step")
    _same(_decoded(decode, policy, _sampling(), limits=Limits(rows=rows)), wanted, 2e-5)
    sizes = [size for _, size in steps]
    allowed = {20: {20, 16, 8, 4, 2, 1}, 7: {7, 4, 2, 1}, 1: {1}}[rows]
    assert set(sizes) <= allowed and sizes[0] == rows and sizes == sorted(sizes, reverse=True)
    left = sum(max(0, len(ids) - 1) for ids, _, _ in wanted)  # tokens drawn in a batch
    assert sum(sizes) >= left and (check_every > 1 or sum(sizes) < 2 * left)  # never more than half of the rows idle


@pytest.mark.parametrize("changed", [{"temperature": 0.0}, {"top_p": 0.5}, {"max_tokens": 1}, {"max_tokens": 2}])
def test_every_way_to_sample(policy: Policy, changed: dict[str, Any]) -> None:
    sampling = _sampling(**changed)
    _same(_decoded(decode, policy, sampling), _decoded(hf_reference.decode, policy, sampling), 2e-5)


def _page_gib(policy: Policy) -> float:
    return 64 * kv_bytes(policy) / 2**30


def test_pages_that_run_out_cost_time_but_change_nothing(policy: Policy) -> None:
    """Prompts of 1 to 58 tokens and 300 new ones in 14 pages: rows leave, start again, and draw the same."""
    sampling, lengths = _sampling(max_tokens=300), [300 - 13 * i for i in range(20)]
    wanted = _decoded(hf_reference.decode, policy, sampling, lengths=lengths)
    sampler = Sampler(policy, Limits(rows=8, cache_gib=14.5 * _page_gib(policy), prefill_tokens=20))
    with torch.inference_mode():
        found = sampler.decode(_prompts(policy), sampling, KEYS, lengths)
    _same(found, wanted, 5e-5)
    report = sampler.sleep()
    assert report["rollout/preempted"] > 0 and report["memory/cache_gib"] == pytest.approx(14 * _page_gib(policy))
    assert 10 * _page_gib(policy) < report["memory/cache_used_gib"] <= report["memory/cache_gib"]
    assert report["rollout/rows_computed"] > sum(lengths)
    assert sampler.sleep() == {}


def test_a_request_larger_than_all_pages_is_refused(policy: Policy) -> None:
    """58 tokens of prompt and 40 new ones: a page of the prompt, and two to the end."""
    for pages in (2.5, 3.5):
        with pytest.raises(ConfigError, match=rf"engine\.cache_gib.* {int(pages) - 1} pages .* needs 3"):
            _decoded(decode, policy, _sampling(), limits=Limits(rows=2, cache_gib=pages * _page_gib(policy)))
    _decoded(decode, policy, _sampling(), limits=Limits(rows=2, cache_gib=4.5 * _page_gib(policy)))


def test_noise_and_a_switched_off_adapter_take_effect(policy: Policy, make_noise: Any) -> None:
    """Also in buffers that are kept: they take up every change of adapter and noise, and come back to the same bits."""
    sampler = Sampler(policy, Limits(rows=20, kept_gib=1.0))

    def sampled() -> list[hf_reference.Completion]:
        with torch.inference_mode():
            found = sampler.decode(_prompts(policy), _sampling(), KEYS)
        sampler.sleep()
        _same(found, _decoded(hf_reference.decode, policy, _sampling()), 2e-5)
        return found

    plain, first = sampled(), sampler.kept
    assert first is not None
    with make_noise(policy.norms, 0.1).for_rollout(1, 0):
        assert [one[0] for one in sampled()] != [other[0] for other in plain]
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.mul_(-2.0)
    try:
        assert [one[0] for one in sampled()] != [other[0] for other in plain]
    finally:
        with torch.no_grad():
            for parameter in policy.trainable:
                parameter.div_(-2.0)
    assert sampler.kept is first
    with policy.without_adapter():
        assert [one[0] for one in sampled()] != [other[0] for other in plain]
        assert sampler.kept is not first  # no recording has a layer without its adapter
    _same(sampled(), plain, 2e-6)


def test_what_is_kept_serves_smaller_rollouts_and_no_larger_ones(policy: Policy) -> None:
    sampler = Sampler(policy, Limits(rows=20, kept_gib=1.0))
    prompts = _prompts(policy)
    kept = []
    for count, tokens in ((20, 40), (8, 10), (20, 41), (20, 40)):
        with torch.inference_mode():
            sampler.decode(prompts[: count // SAMPLES], _sampling(max_tokens=tokens), KEYS[:count])
        kept.append(sampler.kept)
    assert kept[0] is kept[1] is not kept[2] and kept[2] is kept[3]
    sampler.limits = Limits(rows=20, kept_gib=0.0)
    assert set(sampler.sleep()) == set(ENGINE_HF) and sampler.kept is None


def test_inputs_of_rows_that_are_done_do_not_count(make_policy: MakePolicy, listen: Callable[..., Any]) -> None:
    steps = listen(hf_graph.Decoding, "_step")
    policy = make_policy("quant.activations=nvfp4", quant="nvfp4", width=64)
    sampler = Sampler(policy, Limits(rows=20, kept_gib=1.0))
    assert policy.rounding is not None
    with torch.inference_mode(), adapters_cast_to(policy.model, policy.model.dtype):
        sampler.decode(_prompts(policy), _sampling(), KEYS)
        before = policy.rounding.counts.clone()
        assert before[1] > 0
        decoding, _ = steps[-1]
        decoding._step(20)
        assert torch.equal(policy.rounding.counts, before)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_rollout_that_ends_early_leaves_nothing_behind(
    policy: Policy, wanted: list[hf_reference.Completion], error: type[BaseException]
) -> None:
    """Memory that runs out, or a kill, in the 20th step: the buffers are freed, and the next call is as the first."""
    sampler = Sampler(policy, Limits(rows=6, kept_gib=1.0))
    with failing(hf_graph.Decoding, "_advance", error, [20]), pytest.raises(error), torch.inference_mode():
        sampler.decode(_prompts(policy), _sampling(), KEYS)
    assert sampler.kept is None
    assert not any(layer.cast_adapter for layer in policy.model.modules() if isinstance(layer, LoRALinear))
    with torch.inference_mode():
        _same(sampler.decode(_prompts(policy), _sampling(), KEYS), wanted, 2e-5)


def test_a_rollout_leaves_nothing_to_the_garbage_collector(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache is large, and training needs the memory at once."""
    caches: list[weakref.ref[torch.Tensor]] = []
    run = hf_graph.Decoding.run

    def watched(self: hf_graph.Decoding) -> Any:
        caches.extend(weakref.ref(tensor) for pair in self.buffers.caches for tensor in pair)
        return run(self)

    monkeypatch.setattr(hf_graph.Decoding, "run", watched)
    gc.collect()
    gc.disable()
    try:
        _decoded(decode, policy, _sampling())
        assert caches and all(cache() is None for cache in caches)
    finally:
        gc.enable()


@pytest.mark.parametrize("graph", [True, False])
def test_with_invariant_a_completion_does_not_depend_on_its_company(policy: Policy, graph: bool) -> None:
    """Alone, with half of its group, behind others in a batch that is refilled: the same tokens; on the reference the
    same bits. The step is not compared to the bit here, since a matmul on a CPU has no fixed order."""
    engine = hf.HFEngine(policy, 6, invariant=True)
    if graph:
        engine.sampler = Sampler(policy, engine.limits)
    prompts = [
        Prompt(id=str(i), messages=({"role": "user", "content": question},), answer="")
        for i, question in enumerate(QUESTIONS)
    ]
    together = {(r.prompt.id, r.sample): r for r in engine.generate(prompts, _sampling())}
    for chosen, samples in ((prompts[2:3], 1), (prompts[3:], 2), (prompts[::-1], SAMPLES)):
        for found in engine.generate(chosen, _sampling(samples=samples)):
            other = together[found.prompt.id, found.sample]
            assert found.token_ids == other.token_ids
            assert found.logprobs == pytest.approx(other.logprobs, abs=2e-5 if graph else 0.0)


# --- adapters at hand ------------------------------------------------------------------------------------------------


def test_rounded_adapters_last_as_long_as_the_context(make_policy: MakePolicy) -> None:
    policy = make_policy(adapted=True)
    layers = [module for module in policy.model.modules() if isinstance(module, LoRALinear)]
    layers[0].fused = True
    a = layers[0].lora_A["default"].weight
    with adapters_cast_to(policy.model, torch.bfloat16):
        assert layers[0].cast_adapter is not None and torch.equal(layers[0].cast_adapter.a, a.bfloat16())
        assert all(layer.cast_adapter is None for layer in layers[1:])
    assert layers[0].cast_adapter is None
    with policy.without_adapter(), adapters_cast_to(policy.model, torch.bfloat16):
        assert layers[0].cast_adapter is None


# --- layers side by side ---------------------------------------------------------------------------------------------


def _attention(policy: Policy) -> list[torch.nn.Module]:
    block = policy.model.get_submodule("model.layers.0.self_attn")
    return [block.get_submodule(f"{name}_proj") for name in "qkv"]


@pytest.mark.parametrize("quant", ["nvfp4", "mxfp4", "nf4"])
@pytest.mark.parametrize("targets", ["[q_proj,k_proj,v_proj]", "[v_proj]", "[o_proj]"])
def test_layers_side_by_side(make_policy: MakePolicy, quant: str, targets: str) -> None:
    """One matmul over one copy, with all, some or none of the adapters; the parts still are what they were."""
    policy = make_policy("model.kv_heads=2", f"lora.targets={targets}", quant=quant, width=64, adapted=True)
    layers, x = _attention(policy), torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    bases: list[Any] = [layer.get_base_layer() if isinstance(layer, LoRALinear) else layer for layer in layers]
    if quant == "mxfp4":  # block scales of k_proj eight times as large: the layout keeps them relative to the largest
        bases[1].get_buffer("weight_scale").add_(3)
        bases[1].get_buffer("weight_scale")[0, 0] = 0  # as of a block of zeros
    for base in bases:
        base.use_kernels()
    assert quant != "mxfp4" or bases[0].kernel_weight.exponent != bases[1].kernel_weight.exponent
    before = [{name: tensor.clone() for name, tensor in base.packed().items()} for base in bases]
    for layer in layers:
        layer.fused = True
    with torch.inference_mode(), adapters_cast_to(policy.model, torch.float32):
        wanted = [layer(x) for layer in layers]
        for _ in range(2):  # the second time nothing has to be moved
            places = [base.get_buffer("kernel_words").data_ptr() for base in bases]
            found = fuse_linears(layers)(x)
            assert len({base.kernel_weight.exponent for base in bases}) == 1
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    words = [base.get_buffer("kernel_words") for base in bases]
    assert [tensor.data_ptr() for tensor in words] == places
    assert words[0].untyped_storage().nbytes() == sum(tensor.nbytes for tensor in words)
    assert all(tensor.untyped_storage().data_ptr() == words[0].untyped_storage().data_ptr() for tensor in words)
    for base, packed in zip(bases, before, strict=True):
        assert all(torch.equal(base.packed()[name], tensor) for name, tensor in packed.items())
    policy.model.get_submodule("model.layers.0.self_attn").half()
    assert not any(tensor.is_inference() for tensor in words)


@pytest.mark.parametrize("targets", ["[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]", "[q_proj,up_proj]"])
@pytest.mark.parametrize(
    ("quant", "activations"), [("nvfp4", "none"), ("bf16", "none"), ("nvfp4", "nvfp4"), ("nvfp4", "fp8")]
)
def test_completions_of_joined_layers(make_policy: MakePolicy, targets: str, quant: str, activations: str) -> None:
    """Twice, as the second round finds the layers joined; then training moves on from them."""
    shape = ("model.heads=4", "model.kv_heads=2", f"lora.targets={targets}", "lora.dropout=0.3")
    shape += (f"quant.activations={activations}",) if activations != "none" else ()
    compare = _same_but_for_flips if activations == "fp8" else partial(_same, tolerance=5e-5)
    policy = _ragged(make_policy(*shape, quant=quant, width=64, sharp=True, adapted=True))
    wanted = _decoded(hf_reference.decode, policy, _sampling())
    for module in policy.model.modules():
        if isinstance(module, PackedLinear):
            module.use_kernels()
        if isinstance(module, LoRALinear):
            module.fused = True
    for _ in range(2):
        compare(_decoded(decode, policy, _sampling()), wanted)
    with policy.without_adapter():
        compare(_decoded(decode, policy, _sampling()), _decoded(hf_reference.decode, policy, _sampling()))
    ids, mask = torch.arange(24).view(2, 12), (torch.arange(12) > 3).expand(2, 12)
    policy.token_stats(ids, mask, 1.0).logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in policy.trainable)


@pytest.mark.parametrize("case", ["one is not laid out", "formats", "rows that fill no tile"])
def test_what_cannot_be_joined_stays_as_it_is(make_policy: MakePolicy, case: str) -> None:
    heads = {"rows that fill no tile": "model.heads=8"}.get(case, "model.heads=2")  # 8 rows of keys, or 32
    layers: list[Any] = [layer.get_base_layer() for layer in _attention(make_policy(heads, width=64))]
    if case == "formats":
        layers[1] = _attention(make_policy(heads, width=64, quant="mxfp4"))[1].get_base_layer()
    for layer in layers if case != "one is not laid out" else layers[:2]:
        layer.use_kernels()
    before = [dict(layer.named_buffers()) for layer in layers]
    assert concat_rows_in_place(layers) is None
    for layer, buffers in zip(layers, before, strict=True):
        assert all(layer.get_buffer(name) is tensor for name, tensor in buffers.items())


def test_layers_whose_adapters_differ_in_scaling_stay_apart(make_policy: MakePolicy) -> None:
    policy, x = make_policy("model.kv_heads=2", width=64, adapted=True), torch.randn(3, 64)
    layers: list[Any] = _attention(policy)
    for layer in layers:
        layer.get_base_layer().use_kernels()
        layer.fused = True
    layers[1].scaling["default"] *= 3
    with torch.inference_mode(), adapters_cast_to(policy.model, torch.float32):
        for one, layer in zip(fuse_linears(layers)(x), layers, strict=True):
            assert torch.equal(one, layer(x))


@pytest.mark.parametrize("targets", ["[q_proj,k_proj,v_proj]", "[v_proj]", "[o_proj]"])
def test_plain_layers_side_by_side(make_policy: MakePolicy, targets: str) -> None:
    """As packed ones; the weights of the parts are rows of the joined one, and can be saved and moved as before."""
    policy = make_policy("model.kv_heads=2", f"lora.targets={targets}", quant="bf16", width=64, adapted=True)
    layers, x = _attention(policy), torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    bases: list[Any] = [layer.get_base_layer() if isinstance(layer, LoRALinear) else layer for layer in layers]
    before = [base.weight.clone() for base in bases]
    for layer in layers:
        layer.fused = True
    with torch.inference_mode(), adapters_cast_to(policy.model, torch.float32):
        wanted = [layer(x) for layer in layers]
        for _ in range(2):  # the second time nothing has to be moved
            places = [base.weight.data_ptr() for base in bases]
            for one, other in zip(fuse_linears(layers)(x), wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert [base.weight.data_ptr() for base in bases] == places
    assert len({base.weight.untyped_storage().data_ptr() for base in bases}) == 1
    assert all(torch.equal(base.weight, weight) for base, weight in zip(bases, before, strict=True))
    policy.model.get_submodule("model.layers.0.self_attn").half()
    assert not any(base.weight.is_inference() or base.weight.requires_grad for base in bases)


def test_trained_layers_stay_apart(make_policy: MakePolicy) -> None:
    policy, x = make_policy("model.kv_heads=2", quant="bf16", width=64), torch.randn(3, 64)
    layers: list[Any] = [layer.get_base_layer() for layer in _attention(policy)]
    layers[1].weight.requires_grad_(True)
    with torch.inference_mode():
        for one, layer in zip(fuse_linears(layers)(x), layers, strict=True):
            assert torch.equal(one, layer(x))
    assert len({layer.weight.untyped_storage().data_ptr() for layer in layers}) == 3


def test_layers_with_adapters_of_peft_stay_apart(make_policy: MakePolicy, listen: Callable[..., list[Any]]) -> None:
    policy, x = make_policy("model.kv_heads=2", adapted=True), torch.randn(3, 32)
    layers: list[Any] = _attention(policy)
    joined = listen(kernels, "concat_rows_in_place")
    with torch.inference_mode(), adapters_cast_to(policy.model, torch.float32):
        for one, layer in zip(fuse_linears(layers)(x), layers, strict=True):
            assert torch.equal(one, layer(x))
    assert not joined  # adapters that only PEFT can apply


# --- when it is used -------------------------------------------------------------------------------------------------


def test_reasons_to_go_through_transformers(make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy()
    config = policy.model.config
    assert "fused kernels" in str(eager_reason(policy))
    engine = hf.HFEngine(policy, 4)
    assert engine.sampler is None and engine.record()["decoding"].startswith("eager: without fused kernels")
    policy.fused = True
    assert eager_reason(policy) == "a packed layer runs the reference"
    for layer in policy.layers:
        policy.model.get_submodule(layer).get_base_layer().use_kernels()
    assert eager_reason(policy) is None
    engine = hf.HFEngine(policy, 4)
    assert engine.sampler is not None
    said = engine.record()
    assert said["decoding"] == "cuda graphs" and said["recorded_rows"] == [1, 2, 4]
    head = config.hidden_size // config.num_attention_heads
    assert said["kv_bytes_per_token"] == 2 * config.num_hidden_layers * config.num_key_value_heads * head * 4
    for name, value, reason in (
        ("model_type", "gemma2", "gemma2"),
        ("hidden_act", "gelu", "with gelu"),
        ("layer_types", ["full_attention", "linear_attention"], "without full attention"),
        ("rope_parameters", {"rope_type": "longrope"}, "rotary"),
        ("rope_parameters", {"full_attention": {"rope_type": "dynamic"}}, "rotary"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(config, name, value)
            assert reason in str(eager_reason(policy))


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["nvfp4", "bf16"])
def on_gpu(make_policy: MakePolicy, request: pytest.FixtureRequest) -> Policy:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    words = ("device=cuda", "model.dtype=bfloat16", "model.heads=4", "model.kv_heads=2", "model.intermediate_size=256")
    return _ragged(make_policy(*words, quant=request.param, width=128, sharp=True, adapted=True, device="cuda"))


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short rollout shrinks."""
    monkeypatch.setattr(hf_graph, "CHECK_STOP_EVERY", 4)


@pytest.mark.gpu
@pytest.mark.usefixtures("small_steps")
def test_a_replay_is_what_was_recorded(on_gpu: Policy, make_noise: Any) -> None:
    """The same bits with and without a recording, now and after every change to adapter and noise."""
    policy = on_gpu
    assert eager_reason(policy) is None

    sampling = _sampling(temperature=4.0)  # or most samples of so sharp a model would end where the first does

    def both() -> list[hf_reference.Completion]:
        with_graph = _decoded(decode, policy, sampling)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hf_graph.Decoding, "_advance", hf_graph.Decoding._step)
            _same(with_graph, _decoded(decode, policy, sampling), 0.0)
        return with_graph

    first = both()
    assert len({len(ids) for ids, _, _ in first}) > 4
    with make_noise(policy.norms, 0.1).for_rollout(1, 0):
        noisy = both()
    with policy.without_adapter():
        bare = both()
    kept = [parameter.detach().clone() for parameter in policy.trainable]
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.mul_(-1.5)
    trained = both()
    with torch.no_grad():
        for parameter, old in zip(policy.trainable, kept, strict=True):
            parameter.copy_(old)
    _same(both(), first, 0.0)
    drawn = [[ids for ids, _, _ in completions] for completions in (first, noisy, bare, trained)]
    assert all(one != other for i, one in enumerate(drawn) for other in drawn[:i])


@pytest.mark.gpu
@pytest.mark.usefixtures("small_steps")
def test_exact_lengths_are_replayed_to_the_token(on_gpu: Policy) -> None:
    """Whatever stop tokens they draw; the same bits with and without a recording."""
    lengths = [1 + (7 * i) % 40 for i in range(len(KEYS))]
    found = _decoded(decode, on_gpu, _sampling(temperature=4.0), lengths=lengths)
    assert [len(ids) for ids, _, _ in found] == lengths and len(set(lengths)) > 10
    assert any(token in on_gpu.stop_ids for ids, _, _ in found for token in ids[:-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_graph.Decoding, "_advance", hf_graph.Decoding._step)
        _same(found, _decoded(decode, on_gpu, _sampling(temperature=4.0), lengths=lengths), 0.0)


@pytest.mark.gpu
@pytest.mark.usefixtures("small_steps")
def test_the_trainer_agrees_as_well_as_with_transformers(on_gpu: Policy) -> None:
    """Log-probabilities against one full pass over the finished sequences, in the rounding of 16 bits."""
    policy = on_gpu
    distances = []
    for how in (hf_reference.decode, decode):
        completions = _decoded(how, policy, _sampling())
        prompts = [ids for ids in _prompts(policy) for _ in range(SAMPLES)]
        batch = make_batch(
            prompts, [one[0] for one in completions], policy.pad_id, policy.device, [one[1] for one in completions]
        )
        with torch.no_grad():
            stats = policy.token_stats(batch.input_ids, batch.mask, 1.0)
        distances.append(float((stats.logprobs - batch.sampler_logprobs)[batch.mask].abs().mean()))
    assert distances[1] < 1.5 * distances[0] + 1e-3 and distances[1] < 0.2, distances


@pytest.mark.gpu
@pytest.mark.usefixtures("small_steps")
def test_nothing_is_held_after_a_round(on_gpu: Policy) -> None:
    _decoded(decode, on_gpu, _sampling())
    gc.collect()
    before = torch.cuda.memory_allocated()
    _decoded(decode, on_gpu, _sampling())
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert not any(layer.cast_adapter for layer in on_gpu.model.modules() if isinstance(layer, LoRALinear))
