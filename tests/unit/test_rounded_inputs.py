"""quant.activations and rollout.activations: the rounding by hand, what a layer does with it, and runs in which trainer
and sampler round differently."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_bench.config import build, compose
from qerl_bench.engine.base import Sampling
from qerl_bench.engine.recordable import eager_reason
from qerl_bench.engine.rollout_queue import Limits
from qerl_bench.engine.sampler import Sampler
from qerl_bench.model import kernels
from qerl_bench.model.block import FusedBlock, fuse_blocks
from qerl_bench.model.lm_head import decoder_of
from qerl_bench.model_setup import build_policy
from qerl_bench.quant.activations import REASON, Rounding, round_inputs
from qerl_bench.quant.base import ACTIVATIONS
from qerl_bench.quant.linear import PackedLinear, pack_linear
from qerl_bench.train.recorded_passes import why_not
from qerl_core.checks import ConfigError
from qerl_core.options.fingerprint import ADDED_LATER, fingerprint, scientific
from qerl_core.rundir.finished_run import without_training
from qerl_kernels import fp8, training_block_reference
from qerl_kernels.activations import KINDS, round_blocks
from qerl_kernels.training_linear import Adapter
from tests.short_runs import steps_of
from tests.weight_formats import PLAIN, symmetric

ROUNDED = tuple(kind for kind in ACTIVATIONS if kind != "none")
kinds = pytest.mark.parametrize("kind", ROUNDED)
FORMATS = ("nvfp4", "mxfp4", "nf4", "fp8", "int8", "int4", "mxfp8")


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


# --- the reference ----------------------------------------------------------------------------------------------------


def test_every_kind_has_a_reference() -> None:
    assert set(KINDS) == set(ROUNDED)


def test_mxfp4_by_hand() -> None:
    # The largest, 6, has the scale 1, so that inputs are rounded to E2M1 itself; the second block is the first over 8.
    block = [0.2, 0.3, 0.7, 0.8, 1.2, 1.3, 1.7, 1.8, 2.4, 2.6, 3.4, 3.6, 4.9, 5.1, 6.0, -0.3, *[0.0] * 16]
    grid = [0.0, 0.5, 0.5, 1.0, 1.0, 1.5, 1.5, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 6.0, 6.0, -0.5, *[0.0] * 16]
    x = torch.tensor([block + [value / 8 for value in block]])
    assert round_blocks(x, "mxfp4").tolist() == [grid + [value / 8 for value in grid]]


def test_nvfp4_by_hand() -> None:
    # The token's largest, 2688, makes its tensor scale 1; the second block's largest, 6, has the block scale 1.
    x = torch.zeros(2, 32)
    x[0, 0], x[0, 16:20] = 2688.0, torch.tensor([6.0, 2.4, -0.3, 0.2])
    x[1, 0:4] = torch.tensor([6.0, 2.4, -0.3, 0.2])  # another token with a scale of its own
    found = round_blocks(x, "nvfp4")
    assert found[0, 0] == 2688.0 and found[0, 16:20].tolist() == [6.0, 2.0, -0.5, 0.0]
    assert found[1, :4].tolist() == pytest.approx([6.0, 2.0, -0.5, 0.0], rel=1e-6)


@pytest.mark.parametrize(("kind", "span"), [("fp8", 448.0), ("int8", 127.5)])
def test_8_bits_by_hand(kind: str, span: float) -> None:
    x = torch.tensor([[span, 17.6, -3.3, 0.2], [span / 2, 8.8, -1.65, 0.1]])
    expected = {"fp8": [448.0, 18.0, -3.25, 0.203125], "int8": [127.0, 18.0, -3.0, 0.0]}[kind]
    found = round_blocks(x, kind)
    assert found[0].tolist() == expected and found[1].tolist() == [value / 2 for value in expected]


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_is_rounded_by_itself_and_rounding_again_changes_little(kind: str, dtype: torch.dtype) -> None:
    x = _x(3, 5, 64, dtype=dtype) * torch.logspace(-3, 2, 5)[:, None].to(dtype)
    found = round_blocks(x, kind)
    assert found.shape == x.shape and found.dtype == dtype
    for batch, row in ((0, 0), (2, 3)):
        assert torch.equal(round_blocks(x[batch, row], kind), found[batch, row])
    error = (found - x).float().norm() / x.float().norm()
    assert {"fp8": 0.01, "int8": 0.002}.get(kind, 0.05) < error < {"fp8": 0.05, "int8": 0.02}.get(kind, 0.15)
    torch.testing.assert_close(round_blocks(found, kind), found, rtol=2**-6 if kind == "int8" else 2**-7, atol=1e-6)


@kinds
def test_zeros_stay_and_so_does_what_is_not_finite(kind: str) -> None:
    assert torch.equal(round_blocks(torch.zeros(2, 64), kind), torch.zeros(2, 64))
    assert round_blocks(torch.zeros(0, 64), kind).shape == (0, 64)
    x = _x(3, 64)
    x[1, 5], x[2, 6] = torch.nan, torch.inf
    found = round_blocks(x, kind)
    assert bool(found[0].isfinite().all()) and bool(found[1, 5].isnan()) and found[2, 6] == torch.inf


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@kinds
def test_a_gpu_rounds_to_the_same_bits(kind: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = _x(64, 256, dtype=dtype)
        assert torch.equal(round_blocks(x.cuda(), kind).cpu(), round_blocks(x, kind))


# --- one layer --------------------------------------------------------------------------------------------------------


@kinds
def test_a_layer_multiplies_the_rounded_input_and_its_gradient_passes_straight_through(kind: str) -> None:
    layer: Any = pack_linear("a", torch.nn.Linear(64, 48), symmetric("int4", 32))
    x, grad = _x(5, 64).requires_grad_(), _x(5, 48)
    plain = layer(round_blocks(x.detach(), kind))
    layer(x).backward(grad)
    expected, x.grad = x.grad, None
    layer.rounding = Rounding(kind, torch.device("cpu"))
    y = layer(x)
    assert torch.equal(y, plain)
    y.backward(grad)
    assert torch.equal(x.grad, expected)


@kinds
def test_underflow_is_counted(kind: str) -> None:
    rounding, lost, inputs = Rounding(kind, torch.device("cpu")), 0, 0
    for seed in range(3):
        x = torch.randn(7, 64, generator=torch.Generator().manual_seed(seed)) ** 5
        x[0] = 0
        rounded = rounding(x)
        lost += sum(a != 0 and b == 0 for a, b in zip(x.flatten().tolist(), rounded.flatten().tolist(), strict=True))
        inputs += int((x != 0).sum())
    with rounding.off():
        assert torch.equal(rounding(x), x)
    assert rounding.take() == (lost, inputs) and lost > 0
    assert rounding.take() == (0, 0)


# --- a policy ---------------------------------------------------------------------------------------------------------


def test_the_adapter_reads_the_input_as_it_is(make_policy: Callable[..., Any]) -> None:
    policy = make_policy("quant.activations=int8", quant="nvfp4", adapted=True)
    layer = policy.model.get_submodule("model.layers.0.mlp.up_proj")
    x = _x(4, 32)
    a, b = (layer.get_parameter(f"lora_{name}.default.weight") for name in "AB")
    with torch.no_grad():
        base = layer.base_layer(x)
        expected = base + (x @ a.t()) @ b.t() * layer.scaling["default"]
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
        with policy.rounding.off():
            assert not torch.equal(layer.base_layer(x), base)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_passes_give_the_same_gradient(make_policy: Callable[..., Any], mode: str) -> None:
    ids = torch.arange(24).reshape(2, 12) % 97
    gradients = []
    for recompute in ("none", mode):
        words = ("quant.activations=nvfp4", f"train.recompute={recompute}")
        policy = make_policy(*words, quant="nvfp4", sharp=True, adapted=True)
        policy.train_mode(True)
        policy.token_stats(ids, ids > 0, 1.0).logprobs.sum().backward()
        gradients.append([parameter.grad.clone() for parameter in policy.trainable])
        policy.model.zero_grad()
    assert all(torch.equal(left, right) for left, right in zip(*gradients, strict=True))


def test_fused_paths_of_training_are_refused_with_one_reason(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        policy = make_policy("quant.activations=fp8", "kernel=block", quant="nvfp4")
    assert sum("are rounded to fp8" in record.getMessage() for record in caplog.records) == 1
    assert not any(isinstance(module.forward, FusedBlock) for module in policy.model.modules())
    policy.fused = True
    for module in policy.model.modules():
        if isinstance(module, PackedLinear):
            module.use_kernels()
    assert eager_reason(policy) is None
    policy.device = torch.device("cuda")
    assert why_not(make_experiment("quant=nvfp4"), policy) == REASON


def test_without_rounding_nothing_is_there(make_policy: Callable[..., Any]) -> None:
    policy = make_policy("quant.activations=none", "rollout.activations=none", quant="nvfp4")
    layers = [module for module in policy.model.modules() if isinstance(module, PackedLinear)]
    assert policy.rounding is None and all(layer.rounding is None for layer in layers)


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    from qerl_bench.model.load import load_packed
    from tests.models import builds

    folder = builds.build("qwen3_moe", tmp_path / "moe")
    words = ("model=hub", f"model.id={folder}", "model.dtype=float32", "quant=nvfp4", "quant.activations=nvfp4")
    experiment = build(compose([*words, "device=cpu"]))
    parts = experiment.model, experiment.quant, experiment.quantizer, experiment.task
    model, *_ = load_packed(*parts, None, "cpu")
    with pytest.raises(ConfigError, match=r"activations=nvfp4 .*experts of model=moe .*activations=none"):
        round_inputs(model, "nvfp4", "model=moe")
    with pytest.raises(ConfigError, match=r"activations=nvfp4 .*experts"):
        build_policy(experiment, None, "cpu")


# --- runs -------------------------------------------------------------------------------------------------------------

WORDS = ("task=even_characters", "optim.lr=0.05", "eval=none", "steps=2")


def _run(make_config: Callable[..., Any], root: Path, name: str, *words: str) -> list[dict[str, Any]]:
    return steps_of(make_config, root, name, *WORDS, *words)


def test_the_neutral_values_are_those_of_runs_from_before(
    make_config: Callable[..., Any], tmp_path: Path, no_figures: None
) -> None:
    """Names and numbers; as of the commit before these keys, a run of quant=mxfp4 was compared by hand."""
    neutral = {key: value for key, value in ADDED_LATER.items() if "activations" in key or ".keep_" in key}
    assert len(neutral) == 7
    cfg = make_config("quant=mxfp4")
    config = scientific(cfg)
    assert not any(key.rpartition(".")[2] in config[key.partition(".")[0]] for key in neutral if "aqn" not in key)
    words = [f"{key}={'null' if value is None else value}" for key, value in neutral.items() if "aqn" not in key]
    assert fingerprint(make_config("quant=mxfp4", *words)) == fingerprint(cfg)
    imitated = make_config("aqn=format_error")
    assert {"keep_first", "keep_last", "activations"} & set(imitated.aqn.format)
    assert not {"keep_first", "keep_last", "activations"} & set(scientific(imitated)["aqn"]["format"])
    plain = _run(make_config, tmp_path, "plain", "quant=mxfp4")
    said = _run(make_config, tmp_path, "said", "quant=mxfp4", "rollout.activations=none")
    assert plain == said and not any(key.startswith("activations") for key in plain[0])


def test_trainer_and_sampler_round_apart(make_config: Callable[..., Any], tmp_path: Path, no_figures: None) -> None:
    """Four arms: what each metric sees, and that where only one rounds, the two are parted."""
    found = {}
    for trainer in ("none", "nvfp4"):
        for sampler in ("none", "nvfp4", "null"):
            words = (f"quant.activations={trainer}", f"rollout.activations={sampler}")
            found[trainer, sampler] = _run(make_config, tmp_path, f"{trainer}-{sampler}", "quant=nvfp4", *words)
    assert found["none", "null"] == found["none", "none"] and found["nvfp4", "null"] == found["nvfp4", "nvfp4"]
    for (trainer, sampler), records in found.items():
        sampler = trainer if sampler == "null" else sampler
        for record in records:
            assert ("activations/underflow" in record) == (trainer != "none")
            assert ("activations/underflow_rollout" in record) == (sampler != "none")
            assert all(0 < v < 0.5 for k, v in record.items() if k.startswith("activations"))
    parted = [found["none", "nvfp4"][0]["mismatch/kl"], found["nvfp4", "none"][0]["mismatch/kl"]]
    together = [found["none", "none"][0]["mismatch/kl"], found["nvfp4", "nvfp4"][0]["mismatch/kl"]]
    assert min(parted) > 10 * max(together)
    # the first batch is sampled by the same policy, whatever the trainer does with it
    assert found["none", "nvfp4"][0]["entropy"] == found["nvfp4", "nvfp4"][0]["entropy"]
    files = [tmp_path / "runs" / name / "engine.json" for name in ("none-nvfp4", "nvfp4-null")]
    said = [json.loads(file.read_text()) for file in files]
    assert [(one["activations"], one["copies_of_weights"]) for one in said] == [("nvfp4", 2), ("nvfp4", 1)]


def test_the_sampler_is_the_policy_that_rounds_so(make_experiment: Any, make_policy: Any) -> None:
    from qerl_bench.run_setup import on_base_of

    ids = torch.arange(24).reshape(2, 12) % 97

    def logprobs(policy: Any) -> torch.Tensor:
        with torch.no_grad():
            return policy.token_stats(ids, ids > 0, 1.0).logprobs

    experiment, policy = make_experiment("quant=nvfp4"), make_policy(quant="nvfp4", sharp=True, adapted=True)
    expected = make_policy("quant.activations=mxfp4", quant="nvfp4", sharp=True, adapted=True)
    engine = experiment.engine.build(policy)
    other = experiment.in_format("rollout.quant", None, "mxfp4")
    with on_base_of(other, "rollout.quant", experiment, policy, engine) as (copy, sampler):
        assert vars(sampler)["policy"] is copy is not policy and copy.rounding.kind == "mxfp4"
        assert torch.equal(logprobs(copy), logprobs(expected))
        assert not torch.equal(logprobs(copy), logprobs(policy))
    other = experiment.in_format("rollout.quant", "nvfp4", "none")
    with on_base_of(other, "rollout.quant", experiment, policy, engine) as same:
        assert same == (policy, engine)


def test_an_other_format_rounds_as_training_does_unless_it_is_said(make_experiment: Any) -> None:
    trained = make_experiment("quant=mxfp4", "quant.activations=mxfp4")
    in_nvfp4 = trained.in_format("rollout.quant", "nvfp4")
    assert (in_nvfp4.quant.name, in_nvfp4.quant.activations) == ("nvfp4", "mxfp4")
    assert trained.in_format("rollout.quant", "nvfp4", "none").quant.activations == "none"
    assert trained.in_format("rollout.quant", None, "none").quant.activations == "none"
    assert trained.in_format("eval.quant", "bf16").quant.activations == "none"
    assert trained.in_format("rollout.quant", None) is trained


def test_a_later_evaluation_forgets_what_the_sampler_did(make_config: Any) -> None:
    cfg = make_config("quant=nvfp4", "rollout.activations=fp8")
    assert build(without_training(cfg)).rollout.activations is None


KINDS_OF_INPUTS = [*ACTIVATIONS] * 2
PAIRS = [(quant, kind) for place, quant in enumerate(FORMATS) for kind in KINDS_OF_INPUTS[place : place + 2]]


@pytest.mark.parametrize(("quant", "kind"), PAIRS)
def test_every_format_and_every_rounding_trains(
    quant: str, kind: str, make_config: Callable[..., Any], tmp_path: Path, no_figures: None
) -> None:
    """Each in two pairs: a layer rounds its input before, and whatever, it decodes."""
    assert {kind for _, kind in PAIRS} == {*ACTIVATIONS}
    words = (f"quant={quant}", f"quant.activations={kind}", "model.hidden_size=64", "steps=1", "aqn=constant")
    (record,) = _run(make_config, tmp_path, "run", *words)
    assert record["packed_share"] == 1.0 and record["grad_norm"] > 0
    assert record["mismatch/kernel_kl"] < 1e-3
    assert ("activations/underflow" in record) == (kind != "none")


def test_the_specs_that_tests_share_are_those_of_the_files() -> None:
    for name in ("fp8", "int8", "int4"):
        spec = build(compose([f"quant={name}"])).quant
        assert spec == symmetric(name, vars(spec)["block"]) and vars(spec).items() >= PLAIN.items()


# --- FP8 by FP8, on a CPU, which multiplies it too if it is asked to --------------------------------------------------

IN_FP8 = ("quant.activations=fp8", "model.dtype=bfloat16")
BF16 = torch.bfloat16


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and (not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9)):
        pytest.skip("needs a GPU that multiplies FP8")
    return request.param


@pytest.fixture
def on_card(stand_in: Any) -> Callable[..., list[str]]:
    def chosen(policy: Any, capability: tuple[int, int] = (9, 0)) -> list[str]:
        stand_in(kernels, why_not_fused=lambda *_: None)
        stand_in(torch.cuda, get_device_capability=lambda *_: capability)
        policy.kernels = kernels.choose_kernels(policy.model, policy.layers, "auto")
        return [*policy.kernels.values()]

    return chosen


def _far(found: Any, wanted: Any) -> float:
    one, other = (torch.cat([x.detach().double().flatten() for x in of]) for of in (found, wanted))
    return float((one - other).norm() / other.norm())


def _bytes(layers: Any) -> list[Any]:
    packed = [tensor for layer in layers for tensor in layer.packed().values()]
    return [(tensor.dtype, tensor.view(torch.uint8).tolist()) for tensor in packed]


def test_a_layer_multiplies_the_codes_of_what_the_reference_multiplies(place: str) -> None:
    """Gradients pass straight through, and the adapter reads the input as it is."""
    linear, spec = torch.nn.Linear(64, 48, dtype=BF16, device=place), symmetric("fp8", "row")
    layer: Any = pack_linear("a", linear, spec)
    reference: Any = pack_linear("a", linear, spec)
    layer.rounding, reference.rounding = (Rounding("fp8", torch.device(place)) for _ in "12")
    layer.use_fp8()
    x, grad = (_x(10, 64) ** 5).to(place, BF16).requires_grad_(), _x(10, 48, dtype=BF16).to(place)
    codes, scales = fp8.quantize(x.detach(), torch.zeros(2, dtype=torch.long, device=place))
    exact = (codes.double() * scales.double()) @ reference.operand(torch.float32).double().t() + layer.bias.double()
    found, plain = layer(x), reference(x)
    assert _far(found, exact) < 0.0025 and (place == "cuda" or torch.equal(found, exact.to(BF16)))
    counts = layer.rounding.take()
    assert counts == reference.rounding.take() and counts[0] > 0 and _bytes([layer]) == _bytes([reference])
    assert torch.equal(torch.autograd.grad(found, x, grad)[0], torch.autograd.grad(plain, x, grad)[0])

    leaves = x, a, b = x, *(_x(*shape).to(place, BF16).requires_grad_() for shape in ((4, 64), (48, 4)))
    y, apart = layer(x, Adapter(a, b, 0.5)), 0.5 * (x @ a.t()) @ b.t()
    assert _far(*(torch.autograd.grad(one, leaves, grad) for one in (y, reference(x) + apart))) < 0.005
    with torch.no_grad():
        for of_both in (y, layer(x, Adapter(a, b, 0.5))):
            assert (
                _far(of_both, found + apart) < 0.006 < _far(of_both, found + (round_blocks(x, "fp8") @ a.t()) @ b.t())
            )
        with layer.rounding.off(), reference.rounding.off():  # the weight in 16 bits, as in checks before a run
            assert torch.equal(layer(x), reference(x))


@pytest.mark.parametrize("gradients", ["bf16", "fp8"])
def test_a_policy_multiplies_fp8_wherever_it_trains_and_samples(
    gradients: str, make_policy: Any, make_experiment: Any, on_card: Any, stand_in: Any, place: str
) -> None:
    """In fused blocks and recorded steps, over one copy of the weights; and it is recorded."""
    options: Any = {"quant": "fp8", "width": 64, "adapted": True, "device": place}
    words = (*IN_FP8, f"train.gradients={gradients}")
    reference, policy = (make_policy(*words, f"kernel={kernel}", **options) for kernel in ("torch", "block"))
    packed = [module for module in policy.model.modules() if isinstance(module, PackedLinear)]
    before, engine = _bytes(packed), make_experiment().engine
    assert engine.build(reference).record()["layers_in_fp8"] == 0
    if place == "cpu":
        on_card(policy)
        assert fuse_blocks(decoder_of(policy.model), training_block_reference) is None
    assert engine.build(policy).record()["layers_in_fp8"] == 14 == len(packed)
    assert not any(map(kernels.rounds, packed)) and isinstance(policy.model.model.layers[0].forward, FusedBlock)
    ids, mask = torch.arange(24, device=place).reshape(2, 12) + 3, (torch.arange(12, device=place) > 0).expand(2, 12)
    plain = reference.token_stats(ids, mask, 1.0).logprobs
    wanted = torch.autograd.grad(plain.sum(), reference.trainable)
    if gradients == "fp8":
        stand_in(PackedLinear, matmul_operand=lambda *_: pytest.fail("a weight was rebuilt"))
    found = policy.token_stats(ids, mask, 1.0).logprobs
    computed = torch.autograd.grad(found.sum(), policy.trainable)
    assert (found - plain).abs().mean() < 0.02 and _far(computed, wanted) < 0.1
    stand_in(PackedLinear, matmul_operand=lambda *_: pytest.fail("a weight was rebuilt"))
    sampling = Sampling(samples=2, temperature=1.0, max_tokens=9, seed=0)
    with torch.inference_mode():
        Sampler(policy, Limits(rows=4, kept_gib=1.0)).decode(ids.tolist(), sampling, [*range(4)])
    assert _bytes(packed) == before and policy.rounding.take()[1] > 0
    assert len({layer._fp8_weight()[0].untyped_storage().data_ptr() for layer in packed}) == 8  # four of a block


def test_the_gradient_of_an_input_is_made_of_rounded_ones(place: str) -> None:
    """Of the definition, in FP64, and the adapter's gradients as they are; off where rounding is off."""
    linear, spec = torch.nn.Linear(64, 48, dtype=BF16, device=place), symmetric("fp8", "row")
    reference: Any = pack_linear("a", linear, spec)
    layer: Any = pack_linear("a", linear, spec)
    layer.rounding, reference.rounding = (Rounding("fp8", torch.device(place)) for _ in "12")
    layer.use_fp8()
    x, grad = (_x(10, size, dtype=BF16).to(place).requires_grad_(size == 64) for size in (64, 48))
    packed = {name: tensor.double() for name, tensor in reference.packed().items()}
    products = (grad.double() * packed["weight_scale"].t()).to(BF16)
    codes = round_blocks(products, "fp8").double()  # in bfloat16, as the reference multiplies them
    wanted = codes @ packed["weight"]
    plain = torch.autograd.grad(reference(x), x, grad)[0]
    for one in (layer, reference):
        one.rounding.gradients = True
        found = torch.autograd.grad(one(x), x, grad)[0]
        assert found.dtype == BF16 and _far([found], [wanted]) < 0.004 < _far([found], [plain]) < 0.05
        lost, numbers = one.rounding.take_gradients()
        assert numbers == int((products != 0).sum()) and lost == int(((codes == 0) & (products != 0)).sum())
        with one.rounding.off():
            assert torch.equal(torch.autograd.grad(one(x), x, grad)[0], plain)
        assert one.rounding.take_gradients() == (0, 0)
    leaves = x, a, b = x, *(_x(*shape).to(place, BF16).requires_grad_() for shape in ((4, 64), (48, 4)))
    apart = torch.autograd.grad(0.5 * (x @ a.t()) @ b.t(), leaves, grad)
    found = torch.autograd.grad(layer(x, Adapter(a, b, 0.5)), leaves, grad)
    assert _far(found, (wanted + apart[0], *apart[1:])) < 0.005
    bad = grad.detach().clone()
    bad[3, 5] = torch.nan
    assert torch.autograd.grad(layer(x), x, bad)[0].isnan().all(-1).nonzero().tolist() == [[3]]


@pytest.mark.parametrize("words", [(), ("rollout.merge=true", "train.merge=ste"), ("train.recompute=full",)])
def test_rounded_gradients_train(
    words: tuple[str, ...], make_config: Callable[..., Any], tmp_path: Path, no_figures: None
) -> None:
    in_fp8 = ("quant=fp8", "quant.activations=fp8", "model.hidden_size=64", *words)
    plain, rounded = (_run(make_config, tmp_path, name, *in_fp8, f"train.gradients={name}") for name in ("bf16", "fp8"))
    assert "gradients/underflow" not in plain[0] and 0 <= rounded[0]["gradients/underflow"] < 0.2
    assert plain[0]["reward/mean"] == rounded[0]["reward/mean"]
    assert plain[0]["grad_norm"] != rounded[0]["grad_norm"] == pytest.approx(plain[0]["grad_norm"], rel=0.1)


@pytest.mark.parametrize(
    ("words", "capability", "said", "left"),
    [
        (("quant.block=128x128", "model.intermediate_size=256"), (9, 0), "128x128", 14),
        ((), (8, 0), "8.0", 14),
        (("model.intermediate_size=72",), (9, 0), "72", 6),
    ],
)
def test_what_cannot_multiply_fp8_says_so_once(
    words: Any, capability: Any, said: str, left: int, make_policy: Any, on_card: Any, caplog: Any
) -> None:
    policy = make_policy(*IN_FP8, *words, quant="fp8", width=128 if said == "128x128" else 64)
    caplog.clear()  # if an earlier test shows what is logged, making the policy says so too
    with caplog.at_level(logging.INFO):
        assert sum(kernel != kernels.SCALED for kernel in on_card(policy, capability)) == left
    lines = [record.getMessage() for record in caplog.records if "do not multiply FP8" in record.getMessage()]
    assert len({*lines}) == len(lines) == (2 if said == "72" else 1) and all(said in line for line in lines)
    assert sum(map(kernels.rounds, policy.model.modules())) == left
