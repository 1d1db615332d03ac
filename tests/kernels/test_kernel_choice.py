"""Which kernels a policy runs, and that the fused path computes what the reference does, from one packed copy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qerl_bench.engine.base import Sampling
from qerl_bench.engine.hf import HFEngine
from qerl_bench.engine.recordable import eager_reason
from qerl_bench.model import kernels as kernel_choice
from qerl_bench.model.kernels import LoRALinear, choose_kernels
from qerl_bench.quant.linear import PackedLinear, resident_bytes
from qerl_core.checks import ConfigError
from qerl_core.records import Prompt
from qerl_kernels import decode, projection
from qerl_kernels.decode_configs import WGMMA

MakePolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("whole_policies")


def _fused(policy: Any, stand_in: Callable[..., None]) -> dict[str, str]:
    """Let the policy use the fused kernels on a CPU, under the interpreter."""
    stand_in(kernel_choice, why_not_fused=lambda *_: None)
    return choose_kernels(policy.model, policy.layers, "auto")


def _gradients(policy: Any, scores: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(scores.sum(), policy.trainable))


def _ids(rows: int, width: int) -> torch.Tensor:
    return torch.randint(3, 200, (rows, width), generator=torch.Generator().manual_seed(rows))


def _distance(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Of all gradients together, relative; each of them alone has to be in FP32 and of the right shape."""
    assert all(
        one.dtype == torch.float32 and one.shape == other.shape for one, other in zip(found, wanted, strict=True)
    )
    one, other = (torch.cat([x.flatten() for x in gradients]) for gradients in (found, wanted))
    return float((one - other).norm() / other.norm())


def test_on_a_cpu_everything_is_the_reference(make_policy: MakePolicy, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "qerl_bench"):
        policy = make_policy()
    assert set(policy.kernels) == set(policy.layers) and set(policy.kernels.values()) == {"torch"}
    assert not policy.fused
    messages = [record.getMessage() for record in caplog.records]
    assert any("14 layers" in message and message.endswith(": torch") for message in messages)
    assert any("sampling: torch (the device is cpu)" in message for message in messages)
    layers = [module for module in policy.model.modules() if isinstance(module, LoRALinear)]
    assert len(layers) == 14 and not any(layer.fused for layer in layers)


def test_the_option_is_checked(make_config: Callable[..., Any], make_experiment: Callable[..., Any]) -> None:
    assert make_experiment().kernel == "auto" and make_experiment("kernel=torch").kernel == "torch"
    with pytest.raises(ConfigError, match=r"kernel must be .*auto.*torch.*'cuda'"):
        make_experiment("kernel=cuda")


def test_why_not(stand_in: Callable[..., None]) -> None:
    cuda = torch.device("cuda")
    assert kernel_choice.why_not_fused("torch", cuda) == "kernel=torch"
    assert kernel_choice.why_not_fused("auto", torch.device("cpu")) == "the device is cpu"
    stand_in(kernel_choice, find_spec=lambda _: None)
    assert kernel_choice.why_not_fused("auto", cuda) == "the package triton is not installed"


@pytest.mark.parametrize(
    ("quant", "bits"), [("nvfp4", 4.5), ("mxfp4", 4.5), ("nf4", 4.5), ("fp8", 8.25), ("int8", 8.25), ("int4", 4.5)]
)
def test_a_packed_policy_trains_as_before(
    make_policy: MakePolicy, quant: str, bits: float, interpreter: None, stand_in: Callable[..., None]
) -> None:
    """bfloat16: the adapter's products are rounded elsewhere, so scores agree to what that format resolves.

    The same layers then export the very bytes that were packed, and hold nothing twice.
    """
    policy = make_policy("model.dtype=bfloat16", "model.layers=1", quant=quant, width=64, adapted=True)
    packed = {name: module for name, module in policy.model.named_modules() if isinstance(module, PackedLinear)}
    before = {name: {key: x.clone() for key, x in layer.packed().items()} for name, layer in packed.items()}
    ids, mask = _ids(3, 12), torch.ones(3, 12, dtype=torch.bool)
    mask[:, 0] = False
    plain = policy.token_stats(ids, mask, 1.0)
    wanted = _gradients(policy, plain.logprobs)

    chosen = _fused(policy, stand_in)
    assert set(chosen.values()) == {kernel_choice.DEQUANTIZE}
    stand_in(PackedLinear, operand=lambda *_: pytest.fail("the reference was used"))
    found = policy.token_stats(ids, mask, 1.0)
    assert torch.allclose(found.logprobs, plain.logprobs, rtol=0, atol=0.05)
    assert _distance(_gradients(policy, found.logprobs), wanted) < 0.05
    for name, layer in packed.items():
        after = layer.packed()
        assert after.keys() == before[name].keys()
        assert all(torch.equal(after[key].view(torch.uint8), x.view(torch.uint8)) for key, x in before[name].items())
        assert set(dict(layer.named_buffers())) & set(before[name]) <= {"weight_global_scale"}
        padded = -(-layer.in_features // 64) * 64 * -(-layer.out_features // 16) * 16
        assert resident_bytes(layer) <= padded * bits / 8 + 4
        layer.half()  # moves and never converts
        assert layer.kernel_weight is not None and layer.kernel_weight.words.dtype == torch.int32


def test_an_unquantized_policy_keeps_its_weights(make_policy: MakePolicy, stand_in: Callable[..., None]) -> None:
    policy = make_policy("model.dtype=bfloat16", quant="bf16", adapted=True)
    ids, mask = _ids(2, 9), torch.ones(2, 9, dtype=torch.bool)
    mask[:, 0] = False
    plain = policy.token_stats(ids, mask, 1.0)
    wanted = _gradients(policy, plain.logprobs)
    assert set(_fused(policy, stand_in).values()) == {kernel_choice.CUBLAS}
    found = policy.token_stats(ids, mask, 1.0)
    assert torch.allclose(found.logprobs, plain.logprobs, rtol=0, atol=0.05)
    assert _distance(_gradients(policy, found.logprobs), wanted) < 0.05
    with policy.without_adapter():
        base = policy.token_stats(ids, mask, 1.0).logprobs
    assert not torch.allclose(base, found.logprobs, rtol=0, atol=0.1)  # the adapter can still be switched off


@pytest.mark.parametrize("overrides", [("model.dtype=float32",), ("model.dtype=bfloat16", "quant.double_quant=true")])
def test_what_the_kernels_cannot_do_stays_with_the_reference(
    make_policy: MakePolicy, overrides: tuple[str, ...], stand_in: Callable[..., None]
) -> None:
    policy = make_policy(*overrides, quant="nf4", width=64)
    assert set(_fused(policy, stand_in).values()) == {"torch"}


def test_nf4_can_be_multiplied_by_bitsandbytes_itself(make_policy: MakePolicy, stand_in: Callable[..., None]) -> None:
    """Called for each layer, fused kernels or not, and with the scores and gradients of the reference."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    ids, mask = _ids(2, 9), (torch.arange(9) > 0).expand(2, 9)  # nothing predicts the first token
    own, theirs = (
        make_policy("model.dtype=bfloat16", f"quant.backend={name}", quant="nf4", width=64, adapted=True)
        for name in ("own", "bitsandbytes")
    )
    calls: list[int] = []
    multiply = bitsandbytes.matmul_4bit

    def counted(*given: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        return multiply(*given, **options)

    stand_in(bitsandbytes, matmul_4bit=counted)
    assert set(_fused(theirs, stand_in).values()) == {"bitsandbytes matmul_4bit"}
    wanted, found = (policy.token_stats(ids, mask, 1.0) for policy in (own, theirs))
    assert len(calls) == len(theirs.layers)
    assert torch.allclose(found.logprobs, wanted.logprobs, rtol=0, atol=0.05)
    assert _distance(_gradients(theirs, found.logprobs), _gradients(own, wanted.logprobs)) < 0.05
    stand_in(theirs, fused=True)
    assert eager_reason(theirs) == "a packed layer runs the reference"


def test_dropout_is_left_to_peft(make_policy: MakePolicy, stand_in: Callable[..., None]) -> None:
    policy = make_policy("model.dtype=bfloat16", "lora.dropout=0.5")
    _fused(policy, stand_in)
    layer = next(module for module in policy.model.modules() if isinstance(module, LoRALinear))
    assert layer.fused and layer.adapter() is not None
    policy.train_mode(True)
    assert layer.adapter() is None


def test_head_and_sampling_give_the_same_rollouts(
    make_policy: MakePolicy, interpreter: None, stand_in: Callable[..., None]
) -> None:
    """In FP32, all that the interpreter can: same tokens from the same seeds, same scores, same gradient."""
    policy = make_policy("quant=bf16", sharp=True, adapted=True)
    prompts = [Prompt(id="a", messages=({"role": "user", "content": "1+2=?"},), answer="3")]
    sampling = Sampling(samples=3, temperature=0.8, max_tokens=4, seed=5)
    plain = HFEngine(policy, 8).generate(prompts, sampling)
    ids, mask = _ids(2, 7), torch.ones(2, 7, dtype=torch.bool)
    mask[:, 0] = False
    wanted = policy.token_stats(ids, mask, 0.8)
    policy.fused = True
    found = policy.token_stats(ids, mask, 0.8)
    for name in ("logprobs", "entropy", "entropy_t1", "likeliest"):
        assert torch.allclose(getattr(found, name), getattr(wanted, name), rtol=0, atol=1e-4)
    for one, other in zip(_gradients(policy, found.logprobs), _gradients(policy, wanted.logprobs), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-4 * float(other.abs().max()) + 1e-7)
    fused = HFEngine(policy, 8).generate(prompts, sampling)
    for one, other in zip(fused, plain, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert one.entropies == pytest.approx(other.entropies, abs=1e-4)


@pytest.mark.parametrize(
    ("rank", "few", "beside"),
    [(4, 14, False), (4, 13, False), (9, 14, False), (4, 14, True), (4, 13, True), (9, 14, True)],
)
def test_sampling_takes_the_decode_gemm(
    make_policy: MakePolicy, stand_in: Callable[..., None], rank: int, few: int, beside: bool
) -> None:
    """With references in place of the kernels: what is passed to them, adapter and bias included; not where a gradient
    is needed, and an adapter too large for it is added afterwards. More than a few rows are projected by a library,
    unless the matmul is to run beside. Then both kernels are told so, one directly behind the other."""
    policy = make_policy("model.dtype=bfloat16", f"lora.rank={rank}", adapted=True)
    ids = _ids(2, 7)
    with torch.no_grad():
        wanted = policy.model(ids).logits
    calls: list[int] = []
    projected: list[int] = []
    told: list[bool] = []

    def project(x: torch.Tensor, a: torch.Tensor, late: bool) -> torch.Tensor:
        assert late == (beside and rank == 4)
        projected.append(len(x))
        return x @ a.t()

    def decode_gemm(
        x: torch.Tensor, weight: Any, scale: Any, bias: Any, lora: Any = None, beside: bool = False, **_: Any
    ) -> torch.Tensor:
        assert x.is_contiguous() and (lora is None) == (rank == 9)
        calls.append(len(x))
        assert not beside or len(projected) == len(calls)
        told.append(beside)
        return decode.decode_reference(x, weight, scale, bias, lora)

    stand_in(decode, MAX_RANK=8, pays=lambda weight, tokens, dtype, at_hand: tokens <= 14, decode_gemm=decode_gemm)
    stand_in(projection, MAX_ROWS=few, project=project, runs_beside=lambda *_: beside)
    stand_in(kernel_choice, kernel_of=lambda _: WGMMA)
    assert set(_fused(policy, stand_in).values()) == {kernel_choice.DECODE[WGMMA]}
    with torch.inference_mode():
        found = policy.model(ids).logits
    assert calls == [14] * 14 and projected == ([14] * 14 if few == 14 or beside else [])
    assert told == [beside and rank == 4] * 14
    assert torch.allclose(found, wanted, rtol=0, atol=0.05)


@pytest.mark.parametrize("multiple", [1, 256])
def test_joined_layers_tell_the_decode_gemm_their_parts(
    make_policy: MakePolicy, stand_in: Callable[..., None], multiple: int
) -> None:
    """So that it reads only the adapter of each, unless a layer has no adapter or too odd a size."""
    policy = make_policy("model.dtype=bfloat16", "lora.rank=4", adapted=True)
    found: list[Any] = []

    def decode_gemm(x: torch.Tensor, *args: Any, parts: tuple[int, ...] = (), **_: Any) -> torch.Tensor:
        found.append(parts)
        return decode.decode_reference(x, *args)

    stand_in(decode, _MOST_ROWS=multiple, pays=lambda *_, **__: True, decode_gemm=decode_gemm)
    stand_in(projection, project=lambda x, a, beside: x @ a.t())
    stand_in(kernel_choice, kernel_of=lambda _: WGMMA)
    _fused(policy, stand_in)
    attention: Any = next(module for module in policy.model.modules() if hasattr(module, "q_proj"))
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    sizes = tuple(layer.out_features for layer in layers)
    with torch.inference_mode(), kernel_choice.adapters_cast_to(policy.model, torch.bfloat16):
        x = torch.randn(3, layers[0].in_features).bfloat16()
        wanted = [layer(x) for layer in layers]
        together = kernel_choice.fuse_linears(layers)(x)
        layers[1].cast_adapter = None
        layers[1]._disable_adapters = True
        kernel_choice.fuse_linears(layers)(x)
    assert found == [(), (), (), sizes if multiple == 1 else (), ()]
    for one, other in zip(together, wanted, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=0.02)
