"""Weights in 16 bits beside the packed ones, while many rows are decoded: the same completions, and gone afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qerl_bench.config import compose
from qerl_bench.engine import decode_buffers, hf_graph, hf_reference
from qerl_bench.engine.base import Sampling
from qerl_bench.engine.dequantized import Dequantized, copy_bytes
from qerl_bench.engine.rollout_queue import Limits
from qerl_bench.engine.sampler import Sampler
from qerl_bench.model.policy import Policy
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.train.batch import make_batch
from qerl_core.options.fingerprint import as_dict, fingerprint
from qerl_core.rundir.finished_run import with_later_keys
from qerl_kernels import decode as decode_kernels
from qerl_kernels.decode_configs import MMA_V2, WGMMA
from tests.failing import failing, shortages

QUESTIONS = ("7+5=?", "1", "12+34-5=?", "")
SAMPLES = 4
KEYS = list(range(40, 40 + len(QUESTIONS) * SAMPLES))
MakePolicy = Callable[..., Policy]


def _sampling(**changed: Any) -> Sampling:
    return Sampling(**{"samples": SAMPLES, "temperature": 1.0, "max_tokens": 24, "seed": 11, **changed})


def _prompts(policy: Policy) -> list[list[int]]:
    return [policy.prompt_ids(({"role": "user", "content": question},)) for question in QUESTIONS]


def _packed(policy: Policy) -> list[PackedLinear]:
    return [module for module in policy.model.modules() if isinstance(module, PackedLinear)]


@torch.inference_mode()
def _decoded(sampler: Sampler, **changed: Any) -> list[hf_reference.Completion]:
    return sampler.decode(_prompts(sampler.policy), _sampling(**changed), KEYS)


@torch.no_grad()
def _distance(policy: Policy, completions: list[hf_reference.Completion], temperature: float) -> float:
    """How far the log-probabilities of the sampler are from the trainer's, in nats, mean over tokens."""
    prompts = [ids for ids in _prompts(policy) for _ in range(SAMPLES)]
    tokens, logprobs = ([one[part] for one in completions] for part in (0, 1))
    batch = make_batch(prompts, tokens, policy.pad_id, policy.device, logprobs)
    stats = policy.token_stats(batch.input_ids, batch.mask, temperature)
    return float((stats.logprobs - batch.sampler_logprobs)[batch.mask].abs().mean())


@pytest.fixture(scope="module", params=[False, True], ids=["one by one", "joined"])
def policy(make_policy: MakePolicy, request: pytest.FixtureRequest) -> Policy:
    policy = make_policy("model.heads=4", "model.kv_heads=2", width=64, sharp=True, adapted=True)
    if request.param:
        for layer in _packed(policy):
            layer.use_kernels()
        for module in policy.model.modules():
            if hasattr(module, "fused"):
                module.fused = True
    return policy


@pytest.fixture
def rebuilt(listen: Callable[..., Any]) -> list[tuple[Any, ...]]:
    """The layers that rebuild their weight, as often as they do, each with the dtype."""
    return listen(PackedLinear, "operand")


def test_the_smallest_weights_come_first_and_what_does_not_fit_stays_packed(policy: Policy) -> None:
    layers = _packed(policy)
    sizes = sorted(copy_bytes([layer], torch.float32) for layer in layers)
    assert sizes[0] < sizes[-1] and sizes[0] == 4 * min(one.in_features * one.out_features for one in layers)
    for count in (0, 1, len(sizes) - 1, len(sizes)):
        copies = Dequantized(layers, torch.float32, sum(sizes[:count]) / 2**30)
        assert copy_bytes(copies.layers, torch.float32) == sum(sizes[:count]) and copies.bytes == 0
        copies.make(torch.empty)
        assert [layer._kept is not None for layer in layers] == [layer in copies.layers for layer in layers]
        assert copies.bytes == sum(sizes[:count]) and copies.made == (count > 0)
        copies.drop()
        assert copies.bytes == 0 and not any(layer._kept for layer in layers)


def test_completions_are_the_same_and_no_weight_is_rebuilt_in_a_step(
    policy: Policy, rebuilt: list[tuple[Any, ...]]
) -> None:
    plain = _decoded(Sampler(policy, Limits(rows=8)))
    often = len(rebuilt)
    rebuilt.clear()
    sampler = Sampler(policy, Limits(rows=8, dequantized_gib=1.0, kept_gib=1.0))
    for _ in range(2):  # the second rollout makes them anew, in what is kept of the first
        assert _decoded(sampler) == plain
        assert sampler.kept is not None
        copies = sampler.kept.dequantized
        assert len(rebuilt) == len({*rebuilt}) == len(copies.layers) == copies.packed
        assert often > 10 * len(rebuilt) > 0
        rebuilt.clear()
        first = sampler.kept
        sampler.sleep()
        assert sampler.kept is first and copies.bytes == 0 and not any(one._kept for one in copies.layers)


@pytest.mark.parametrize("invariant", [False, True])
def test_a_small_rollout_in_large_buffers_needs_none_unless_all_rows_are_computed(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, invariant: bool
) -> None:
    """With `invariant` the few must be multiplied like the many, or their company would decide their last bits."""
    monkeypatch.setattr(decode_buffers, "few_tokens", lambda device: 4)
    sampler = Sampler(policy, Limits(rows=8, dequantized_gib=1.0, kept_gib=1.0, invariant=invariant))
    made = []
    for prompts in (4, 1):
        with torch.inference_mode():
            sampler.decode(_prompts(policy)[:prompts], _sampling(), KEYS[: prompts * SAMPLES])
        assert sampler.kept is not None and sampler.kept.size.rows == 8
        made.append(sampler.kept.dequantized.made)
        sampler.sleep()
    assert made == [True, invariant]


def test_what_ends_a_rollout_frees_the_copies(policy: Policy, listen: Callable[..., Any]) -> None:
    sampler = Sampler(policy, Limits(rows=8, dequantized_gib=1.0))
    made = listen(Dequantized, "make")
    with failing(hf_graph.Decoding, "_advance", KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        _decoded(sampler)
    ((copies, _),) = made
    assert copies.layers and not any(layer._kept for layer in copies.layers) and sampler.kept is None


def test_without_memory_for_all_none_stays(policy: Policy) -> None:
    with shortages(PackedLinear, "keep_operand", 3), pytest.raises(torch.OutOfMemoryError):
        _decoded(Sampler(policy, Limits(rows=8, dequantized_gib=1.0)))
    assert not any(layer._kept for layer in _packed(policy))


@pytest.mark.parametrize(("kernel", "alone", "beside"), [(WGMMA, 256, 128), (MMA_V2, 64, 32)])
def test_with_few_rows_the_packed_weight_is_read(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, kernel: str, alone: int, beside: int
) -> None:
    """The decode kernel takes fewer tokens where a copy is at hand; a batch that is no larger makes none."""
    layer = _packed(policy)[0]
    layer.use_kernels()
    monkeypatch.setattr(decode_kernels, "kernel_of", lambda device: kernel)
    read: list[int] = []

    def packed(self: PackedLinear, weight: Any, x: torch.Tensor, adapter: Any) -> torch.Tensor:
        read.append(len(x))
        return x.new_zeros(len(x), self.out_features)

    monkeypatch.setattr(PackedLinear, "_decode_gemm", packed)
    monkeypatch.setattr("qerl_bench.quant.linear.dequantize", lambda weight, room=None: layer.operand(torch.bfloat16))

    def counts() -> list[int]:
        read.clear()
        with torch.no_grad():
            for tokens in (1, beside, beside + 1, alone, alone + 1):
                layer(torch.zeros(tokens, layer.in_features, dtype=torch.bfloat16))
        return read[:]

    assert counts() == [1, beside, beside + 1, alone]
    layer.keep_operand(torch.empty(layer.out_features, layer.in_features, dtype=torch.bfloat16))
    assert counts() == [1, beside]
    layer.drop_operand()
    assert counts() == [1, beside, beside + 1, alone]
    sampler = Sampler(policy, Limits(rows=beside, dequantized_gib=1.0))
    assert sampler._dequantized_bytes(beside) == 0
    assert sampler._dequantized_bytes(beside + 1) == copy_bytes(_packed(policy), policy.model.dtype)


def test_runs_from_before_the_option_keep_their_names_and_can_be_evaluated() -> None:
    now = as_dict(compose())
    before = now | {"engine": {key: value for key, value in now["engine"].items() if key != "dequantized_gib"}}
    assert fingerprint(now) == fingerprint(before) != fingerprint(compose(["engine.dequantized_gib=2.0"]))
    assert with_later_keys(before)["engine"] == now["engine"]
    assert "dequantized_gib" not in with_later_keys(as_dict(compose(["engine=vllm"])))["engine"]


@pytest.mark.gpu
@pytest.mark.parametrize("quant", ["nvfp4", "mxfp4", "nf4"])
def test_recorded_steps_read_them_and_their_memory_comes_back(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch, quant: str
) -> None:
    """Recorded steps with and without copies sample what the trainer finds as likely; a rollout leaves no memory."""
    if quant == "nf4":
        pytest.importorskip("bitsandbytes")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    words = ("device=cuda", "model.dtype=bfloat16", "model.heads=4", "model.kv_heads=2", "model.intermediate_size=256")
    policy = make_policy(*words, quant=quant, width=128, sharp=True, adapted=True, device="cuda")
    for kernel in (WGMMA, MMA_V2):
        monkeypatch.setitem(decode_kernels.FEW_TOKENS, kernel, 4)
    sampler = Sampler(policy, Limits(rows=16, dequantized_gib=1.0, kept_gib=1.0))
    plain = _distance(policy, _decoded(Sampler(policy, Limits(rows=16)), temperature=4.0), 4.0)
    for _ in range(3):
        found = _distance(policy, _decoded(sampler, temperature=4.0), 4.0)
        assert found < 1.5 * plain + 1e-3 and found < 0.2, (found, plain)
        assert sampler.kept is not None and len(sampler.kept.dequantized.layers) == sampler.kept.dequantized.packed > 0
        with_copies = {key[0] for key in sampler.kept.graphs}
        held = torch.cuda.memory_allocated()
        freed = sampler.kept.dequantized.bytes
        sampler.sleep()
        assert torch.cuda.memory_allocated() <= held - freed
        assert {key[0] for key in sampler.kept.graphs} == {size for size in with_copies if size <= 4}
    before = torch.cuda.memory_allocated()
    sampler.release()
    gc.collect()
    assert torch.cuda.memory_allocated() < before
