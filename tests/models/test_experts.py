"""Packed experts compute what their dequantized weights compute, in every mixture and format; so do their adapters."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qerl_bench.lora.default import LoRA
from qerl_bench.model import kernels
from qerl_bench.model.adapters import LoRAExperts, adapted_layers, block_linears
from qerl_bench.model.base import moved_to
from qerl_bench.quant.checkpoint import CheckpointReader, skeleton
from qerl_bench.quant.experts import PackedExperts, expert_parameters
from qerl_bench.quant.export import export
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quant.matrices import PackedMatrices
from qerl_bench.quant.packed_checkpoint import read_packed
from qerl_bench.quant.packed_share import packed_share, unpacked_parameters, weights_of
from qerl_bench.quantizer.apply import quantize_model
from qerl_bench.quantizer.calibration import Calibration
from qerl_bench.quantizer.gptq import GPTQ
from qerl_bench.quantizer.mse import BlockScaleSearch
from qerl_core.checks import ConfigError
from qerl_kernels import grouped
from tests.models.builds import build, config_of, draw_weights, known
from tests.weight_formats import FORMATS

IN_4_BITS = ["nvfp4", "mxfp4", "nf4", "nf4-double"]
MIXTURES = [
    "qwen3_moe", "mixtral", "olmoe", "granitemoe", "granitemoehybrid", "gpt_oss", "deepseek_v3", "glm4_moe",
    "glm4_moe_lite", "qwen3_next", "qwen3_5_moe_text", "llama4_text", "minimax_m2", "nemotron_h",
]  # fmt: skip
LAYOUTS = [
    "qwen3_moe",
    "gpt_oss",
    "llama4_text",
    "nemotron_h",
]  # as they are, transposed, without routing, without gate
IDS = torch.tensor([[3, 200, 17, 44, 101, 7, 9, 66], [1, 2, 3, 4, 250, 6, 7, 8]])
LORA = LoRA(name="default", rank=4, alpha=8, dropout=0.0, targets="all", experts=True, train_norms=False)


@cache
def _base(name: str) -> Any:
    if name not in known():
        pytest.skip(f"this transformers has no {name}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(name))
    draw_weights(model, torch.Generator().manual_seed(0))
    return model.eval()


def _packed(name: str, kind: str = "nvfp4") -> Any:
    model = copy.deepcopy(_base(name))
    quantize_model(model, FORMATS[kind])
    return model


def _parameter(matrices: PackedMatrices) -> torch.Tensor:
    """The parameter that the model would have in FP32."""
    stacked = torch.stack([matrices.dequantized(expert) for expert in range(matrices.experts)])
    return stacked.mT.contiguous() if matrices.transposed else stacked


@torch.no_grad()
def _dequantized(name: str, packed: Any) -> Any:
    model = copy.deepcopy(_base(name))
    for path, module in packed.named_modules():
        if isinstance(module, PackedMatrices):
            model.get_parameter(path).copy_(_parameter(module))
        elif isinstance(module, PackedLinear):
            model.get_submodule(path).weight.copy_(module.dequantized())
    return model


@pytest.mark.parametrize("kind", IN_4_BITS)
@pytest.mark.parametrize("name", MIXTURES)
def test_packed_experts_compute_with_the_dequantized_weights(name: str, kind: str) -> None:
    model = copy.deepcopy(_base(name))
    reports = quantize_model(model, FORMATS[kind]).reports
    with torch.no_grad():
        logits, expected = model(IDS).logits, _dequantized(name, model)(IDS).logits
        assert (expected - _base(name)(IDS).logits).abs().max() > 0.05  # packing changed something
    torch.testing.assert_close(logits, expected, rtol=0, atol=3e-5)
    packed = {path: module for path, module in model.named_modules() if weights_of(module)}
    assert packed.keys() == reports.keys()
    assert any(isinstance(module, PackedMatrices) for module in packed.values())
    for path, module in packed.items():
        bits = 8 * reports[path].bytes / weights_of(module)
        assert bits == reports[path].bits_per_weight
        assert bits == pytest.approx(FORMATS[kind].bits_per_weight, rel=0.07)  # the scales of very small layers
        assert 0.03 < reports[path].relative_error < 0.15
    assert packed_share(model) > 0.98
    assert all("conv1d" in name or "gate" in name or "router" in name for name in unpacked_parameters(model))


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_the_dequantized_weights(name: str) -> None:
    packed = _packed(name)
    plain = _dequantized(name, packed)
    embeddings = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(1))
    gradients = []
    for model in (packed, plain):
        x = embeddings.clone().requires_grad_()
        model(inputs_embeds=x).logits.square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5 * float(gradients[1].abs().max()))


def test_routing_weights_get_a_gradient_and_only_experts_with_tokens_are_decoded(listen: Any) -> None:
    packed = _packed("qwen3_moe").model.layers[0].mlp.experts
    assert isinstance(packed, PackedExperts)
    decoded = listen(PackedMatrices, "operand")
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([[1, 3], [3, 1], [1, 3], [3, 1], [3, 4]])  # 4: past the last expert, which means none
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = packed(x, chosen, weights)
    y.square().sum().backward()
    experts = [expert for _, expert, _ in decoded]
    assert experts == [1, 3, 1, 3]  # gate and up, then down; no gradient in x was asked for
    assert weights.grad is not None and weights.grad[4, 1] == 0 and bool((weights.grad.flatten()[:9] != 0).all())
    alone = packed(x[4:], chosen[4:, :1], weights[4:, :1])
    torch.testing.assert_close(y[4:], alone)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "nf4"])
def test_the_layout_of_the_kernels_keeps_every_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = _packed("gpt_oss", kind).model.layers[1].mlp.experts.down_proj
    before = [matrices.packed(expert) for expert in range(matrices.experts)]
    values = _parameter(matrices)
    assert torch.equal(matrices.parameter(torch.float32), values)
    matrices.use_kernels()
    for at_once in (2**28, 3 * 64 * matrices.in_features):  # all four experts, or three and one
        monkeypatch.setattr("qerl_bench.quant.matrices._MAX_WEIGHTS", at_once)
        assert torch.equal(matrices.parameter(torch.float32), values)
    assert matrices.kernel_weight.shape == (4 * 64, matrices.in_features)
    for expert, wanted in enumerate(before):
        found = matrices.packed(expert)
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert torch.equal(found[key].view(torch.uint8).flatten(), tensor.view(torch.uint8).flatten()), key
    assert torch.equal(_parameter(matrices), values)
    assert matrices.to(torch.float16).kernel_weight.scales.dtype == before[0].get("absmax", torch.zeros(1).byte()).dtype


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_the_grouped_kernel_gets_what_the_reference_gets(name: str, adapted: bool, stand_in: Any) -> None:
    """The kernel is tested elsewhere; here its plain form takes its place, so that a CPU can run it."""
    model = _packed(name)
    if adapted:
        _trained(LORA.attach(model, name, 0))
    expected = model(IDS).logits
    for module in model.modules():
        if isinstance(module, PackedMatrices):
            module.use_kernels()
    calls = []

    def gemm(x: torch.Tensor, weight: Any, rows: Any, scale: Any = None, bias: Any = None) -> torch.Tensor:
        calls.append(weight)
        return grouped.grouped_reference(x, weight, rows, scale, bias)

    stand_in(grouped, supported=lambda *_: True, sort_rows=grouped.sort_rows_reference, grouped_gemm=gemm)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=1e-3)  # operands are rounded to BF16
    assert len(calls) >= (6 if adapted else 2)
    assert any(module.can_be_captured for module in model.modules() if isinstance(module, PackedExperts))


def _trained(adapter: Any) -> dict[str, torch.Tensor]:
    state = peft.get_peft_model_state_dict(adapter, save_embedding_layers=False)
    generator = torch.Generator().manual_seed(2)
    for key, tensor in state.items():
        if "lora_B" in key:
            state[key] = 0.1 * torch.randn(tensor.shape, generator=generator)
    peft.set_peft_model_state_dict(adapter, state)
    return state


@pytest.mark.parametrize("name", [*LAYOUTS, "deepseek_v3", "qwen3_next"])
def test_an_adapter_on_packed_experts_is_that_of_peft(name: str, tmp_path: Path) -> None:
    model = _packed(name)
    plain = _dequantized(name, model)
    ours, theirs = LORA.attach(model, name, 3), LORA.attach(plain, name, 3)
    initial = [peft.get_peft_model_state_dict(adapter, save_embedding_layers=False) for adapter in (ours, theirs)]
    assert initial[0].keys() == initial[1].keys() and any("experts.base_layer.lora_A" in key for key in initial[0])
    assert all(torch.equal(tensor, initial[1][key]) for key, tensor in initial[0].items())
    trained = _trained(ours)
    ours.save_pretrained(str(tmp_path), save_embedding_layers=False)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved.keys() == trained.keys() and all(torch.equal(saved[key], tensor) for key, tensor in trained.items())
    peft.set_peft_model_state_dict(theirs, saved)
    logits = [adapter(IDS).logits for adapter in (ours, theirs)]
    torch.testing.assert_close(*logits, rtol=0, atol=3e-5)
    with ours.disable_adapter():
        assert (ours(IDS).logits - logits[0]).abs().max() > 0.1
    for of_model in logits:
        of_model.square().sum().backward()
    gradients = [{key: p.grad for key, p in a.named_parameters() if p.requires_grad} for a in (ours, theirs)]
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        wanted = gradients[1][key]
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()), msg=key)


def test_peft_itself_loads_the_adapter_onto_unpacked_experts(tmp_path: Path) -> None:
    model = _packed("qwen3_moe")
    plain = _dequantized("qwen3_moe", model)
    ours = LORA.attach(model, "m", 3)
    _trained(ours)
    ours.save_pretrained(str(tmp_path), save_embedding_layers=False)
    theirs = peft.PeftModel.from_pretrained(plain, str(tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, rtol=0, atol=3e-5)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_noise_on_adapters_of_experts_has_its_size(name: str, packed: bool) -> None:
    """Noise of one unit on B, which was 0, changes a parameter by as much as the parameter has, also if transposed."""
    model = _packed(name)
    weights = dict((plain := _dequantized(name, model)).named_parameters())
    adapter = LORA.attach(model if packed else plain, "m", 3)
    layers = adapted_layers(adapter.get_base_model())
    assert sum(".experts." in layer for layer in layers) > 0
    generator = torch.Generator().manual_seed(0)
    for path, layer in layers.items():
        wrapper: Any = adapter.get_base_model().get_submodule(path.removesuffix(".lora_B.default"))
        b = layer.b.get_parameter("weight")
        b.copy_(layer.unit() * torch.randn(b.shape, generator=generator))
        if isinstance(wrapper, LoRAExperts):
            matrices = wrapper.adapter()
            change = matrices.scaling * matrices.b @ matrices.a
        else:
            change = wrapper.get_delta_weight("default")
        if isinstance(wrapper, ParamWrapper):
            owner = path.split(".experts")[0] + ".experts"
            weight = weights[f"{owner}.{wrapper.parameter_name}"]
        else:
            weight = weights[f"{path.removesuffix('.lora_B.default')}.weight"]
        assert float(change.norm() / weight.norm()) == pytest.approx(1.0, rel=0.35), path


def test_targets_are_all_linear_layers_of_the_blocks_and_no_router() -> None:
    def leaves(name: str) -> set[str]:
        return {path.rpartition(".")[2] for path in block_linears(_base(name))}

    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert leaves("qwen2") == attention | {"gate_proj", "up_proj", "down_proj"}
    assert leaves("phi3") == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert leaves("qwen3_moe") == attention
    assert leaves("llama4_text") == attention | {"gate_proj", "up_proj", "down_proj"}  # its router is a Linear too
    assert {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"} < leaves("deepseek_v3")
    assert {"in_proj_qkvz", "in_proj_ba", "out_proj"} < leaves("qwen3_next")
    assert "shared_expert_gate" not in leaves("qwen3_next")
    assert not any("vision" in path for path in block_linears(_base("gemma3")))


def test_all_is_the_same_adapter_as_the_names_of_a_llama() -> None:
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    states, targets = [], []
    for chosen in ("all", names):
        adapter = replace(LORA, targets=chosen, experts=False).attach(copy.deepcopy(_base("llama")), "m", 5)
        states.append(peft.get_peft_model_state_dict(adapter, save_embedding_layers=False))
        targets.append(set(adapter.peft_config["default"].target_modules))
    assert targets == [set(names), set(names)] and len(states[0]) == 2 * 7 * 2
    assert all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())


def test_listed_targets_do_not_mean_experts() -> None:
    spec = replace(LORA, targets=["gate_proj", "down_proj"], experts=False)
    adapter = spec.attach(_packed("glm4_moe"), "m", 0)
    keys = peft.get_peft_model_state_dict(adapter, save_embedding_layers=False)
    assert {key.split(".lora_")[0].removeprefix("base_model.model.model.layers.") for key in keys} == {
        *(f"0.mlp.{leaf}" for leaf in ("gate_proj", "down_proj")),
        *(f"1.mlp.shared_experts.{leaf}" for leaf in ("gate_proj", "down_proj")),
    }


def test_experts_that_cannot_be_adapted_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lora.experts=true .* tiny has none.*lora.experts=false"):
        LORA.attach(copy.deepcopy(_base("llama")), "tiny", 0)
    with pytest.raises(ConfigError, match=r"lora.dropout=0.1; use lora.dropout=0"):
        replace(LORA, dropout=0.1)


def test_quantizers_that_need_inputs_refuse_experts_and_mse_packs_them() -> None:
    calibration = Calibration(file=None, samples=1, length=8, seed=0)
    gptq = GPTQ(name="gptq", damping=0.01, calibration=calibration)
    with pytest.raises(ConfigError, match=r"quantizer=gptq .*experts.gate_up_proj .*rtn or mse"):
        quantize_model(copy.deepcopy(_base("qwen3_moe")), FORMATS["nvfp4"], quantizer=gptq)
    name = "model.layers.0.mlp.experts.down_proj"
    errors = [
        quantize_model(copy.deepcopy(_base("qwen3_moe")), FORMATS["nvfp4"], **options).reports[name].relative_error
        for options in ({}, {"quantizer": BlockScaleSearch(name="mse", scale_multipliers=[0.75, 1.5])})
    ]
    assert errors[1] < errors[0]


def test_a_module_that_no_rule_covers_stays_and_counts() -> None:
    model = copy.deepcopy(_base("qwen3_moe"))
    for layer in model.model.layers:
        layer.mlp.experts.extra = torch.nn.Parameter(torch.zeros(4, 2, 2))  # a third parameter: another computation
        assert not expert_parameters(layer.mlp.experts)
    quantize_model(model, FORMATS["nvfp4"])
    assert packed_share(model) < 0.5
    assert unpacked_parameters(model)["model.layers.0.mlp.experts.gate_up_proj"] == 4 * 128 * 64


def test_experts_without_kernels_name_their_reference() -> None:
    model = _packed("qwen3_moe")
    adapter = LORA.attach(model, "m", 0)
    names = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.gate_up_proj"]
    assert kernels.choose_kernels(adapter.get_base_model(), names, "auto") == dict.fromkeys(names, kernels.REFERENCE)


# --- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "nemotron_h", "qwen3_5_moe_text"])
def test_experts_stored_one_by_one_are_read_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    build(name, tmp_path)
    model, reader = skeleton(tmp_path, torch.bfloat16), CheckpointReader(tmp_path, "cpu")
    reader.fill(model, [parameter for parameter, _ in model.named_parameters()])
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert tensor.dtype == found[key].dtype and torch.equal(tensor, found[key]), key


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "glm4_moe", "nemotron_h"])
def test_a_model_placed_in_16_bits_keeps_in_32_what_transformers_keeps(name: str, tmp_path: Path) -> None:
    """Routers of some mixtures, from transformers 5.24 on: rounding one sends tokens to other experts."""
    _base(name).save_pretrained(tmp_path)
    expected = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).named_parameters())
    found = dict(moved_to(copy.deepcopy(_base(name)), "cpu", torch.bfloat16).named_parameters())
    assert found.keys() == expected.keys()
    for key, parameter in expected.items():
        assert parameter.dtype == found[key].dtype and torch.equal(parameter, found[key]), key


def test_a_checkpoint_that_lacks_tensors_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    build("qwen3_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")

    def refusal(change: Callable[[dict[str, torch.Tensor]], Any]) -> str:
        changed = dict(tensors)
        change(changed)
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        model = skeleton(tmp_path, torch.float32)
        with pytest.raises(ConfigError) as refused:
            reader = CheckpointReader(tmp_path, "cpu")
            reader.fill(model, [parameter for parameter, _ in model.named_parameters()])
        return str(refused.value)

    expert = "model.layers.1.mlp.experts.2.up_proj.weight"
    assert "lacks 1 of the" in refusal(lambda t: t.pop("model.layers.1.mlp.gate.weight"))
    message = refusal(lambda t: [t.pop(key) for key in list(t) if "layers.1." in key])
    assert "lacks 11 of" in message and "model.layers.1." in message and "config.json" in message
    assert "model.layers.1.mlp.experts.gate_up_proj" in refusal(lambda t: t.pop(expert))
    assert "model.layers.1.mlp.experts.gate_up_proj" in refusal(lambda t: t.update({expert: torch.zeros(64, 32)}))
    assert "has the shape (3,)" in refusal(lambda t: t.update({"model.norm.weight": torch.zeros(3)}))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8", "fp8", "int8", "int4"])
def test_exported_experts_come_back_bit_for_bit(name: str, kind: str, tmp_path: Path) -> None:
    model = moved_to(_packed(name, kind), "cpu", torch.bfloat16)
    export(model, _Tokenizer(), FORMATS[kind], tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    block, leaf, rows = ("block_sparse_moe", "w1", 128) if name == "mixtral" else ("mlp", "gate_proj", 64)
    codes, width = {
        "fp8": ("weight", 64),
        "mxfp8": ("weight", 64),
        "int8": ("weight_packed", 16),
        "int4": ("weight_packed", 8),
    }.get(kind, ("weight_packed", 32))
    assert stored[f"model.layers.1.{block}.experts.3.{leaf}.{codes}"].shape == (rows, width)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", f"model.layers.1.{block}.gate"} <= set(ignored)
    found = read_packed(tmp_path / "out", FORMATS[kind], torch.bfloat16, "cpu").state_dict()
    wanted = model.state_dict()
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(found[key].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_routers_have_the_same_values_in_whichever_dtype_they_are_stored(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """transformers keeps them in 16 bits before 5.24 and in 32 from then on: a base of one goes on with the other."""
    model = moved_to(_packed(name), "cpu", torch.bfloat16)
    gates = {key for key in model.state_dict() if key.endswith(".gate.weight")}
    for key in gates:
        model.get_parameter(key).data.copy_(model.get_parameter(key).bfloat16())
    export(model, _Tokenizer(), FORMATS["nvfp4"], tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    stored = load_file(file)
    assert gates and gates < stored.keys()
    save_file(stored | {key: stored[key].to(dtype) for key in gates}, file, {"format": "pt"})
    found = read_packed(tmp_path / "out", FORMATS["nvfp4"], torch.bfloat16, "cpu")
    wanted = model.state_dict()
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in found.state_dict().items())
    with torch.no_grad():
        assert torch.equal(found(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(("name", "kind"), [("gpt_oss", "nvfp4"), ("llama4_text", "mxfp4"), ("qwen3_moe", "nf4")])
def test_experts_without_a_layer_of_their_own_cannot_be_exported(name: str, kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"experts.* cannot be exported as n?[vmx]*f"):
        export(_packed(name, kind), _Tokenizer(), FORMATS[kind], tmp_path / "out")


class _Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        """Nothing: these tests read weights only."""


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A gpt-oss as published, with random codes, and its experts as transformers dequantizes them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = build("gpt_oss", tmp_path_factory.mktemp("gpt-oss") / "released")
    tensors, expected, generator = load_file(folder / "model.safetensors"), {}, torch.Generator().manual_seed(0)
    for key in [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, k, n = tensors.pop(key).shape
        blocks = torch.randint(0, 256, (experts, n, k // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(115, 126, (experts, n, k // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        expected[key] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, expected


def test_a_published_gpt_oss_is_taken_as_it_is(released: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, expected = released
    model = read_packed(folder, FORMATS["mxfp4"], torch.bfloat16, "cpu")
    packed = {path: module for path, module in model.named_modules() if weights_of(module)}
    assert packed.keys() == expected.keys() and len(expected) == 4  # attention stays in 16 bits, as published
    for path, weight in expected.items():
        assert torch.equal(_parameter(packed[path]), weight.float())
        assert not bool((weight == 0).all())


@pytest.mark.parametrize("kind", ["nvfp4", "nf4"])
def test_a_published_gpt_oss_is_dequantized_for_other_formats(
    released: tuple[Path, dict[str, torch.Tensor]], kind: str
) -> None:
    folder, expected = released
    model = skeleton(folder, torch.bfloat16)
    reports = quantize_model(model, FORMATS[kind], source=CheckpointReader(folder, "cpu")).reports
    assert expected.keys() < reports.keys() and "model.layers.0.self_attn.q_proj" in reports
    for path, weight in expected.items():
        error = (_parameter(model.get_submodule(path)) - weight.float()).norm() / weight.float().norm()
        assert float(error) == pytest.approx(reports[path].relative_error, rel=1e-4)
        assert 0.005 < float(error) < 0.15


def test_the_command_loads_every_way_of_a_published_gpt_oss(
    released: tuple[Path, dict[str, torch.Tensor]], make_experiment: Callable[..., Any]
) -> None:
    from qerl_bench.model.load import load_packed
    from qerl_bench.quant.bf16 import BF16

    folder, expected = released
    experiment = make_experiment()
    spec = _Folder(folder)
    rtn = experiment.quantizer
    plain, *_ = load_packed(spec, BF16(name="bf16"), rtn, experiment.task, None, "cpu")
    assert all(torch.equal(plain.get_parameter(path), weight) for path, weight in expected.items())
    packed, _, reports, *_ = load_packed(spec, FORMATS["mxfp4"], rtn, experiment.task, None, "cpu")
    assert reports.keys() == expected.keys() and all(report.bits_per_weight == 4.25 for report in reports.values())
    logits = [model.float()(IDS).logits for model in (plain, packed)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)


class _Folder:
    """What `load_packed` asks of a model in a folder."""

    dtype = "bfloat16"
    trust_remote_code = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def folder(self) -> Path:
        return self._folder

    def tokenizer(self) -> Any:
        return None
