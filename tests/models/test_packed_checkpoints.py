"""NVFP4 checkpoints as ModelOpt and llm-compressor publish them, W4A4 too: their weights are read, and nothing else."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qerl_bench.config import build as build_experiment
from qerl_bench.config import compose
from qerl_bench.model.load import load_packed
from qerl_bench.quant.error_decomposition import LayerReport
from qerl_bench.quant.export import checkpoint_tensors
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quant.matrices import PackedMatrices
from qerl_core.checks import ConfigError
from tests.models.builds import build

IDS = torch.tensor([[3, 200, 17, 44, 101, 7, 9, 66], [1, 2, 3, 4, 250, 6, 7, 8]])
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
EVEN = torch.tensor([1, 0] * 4, dtype=torch.float64) * 1e-12  # ties go to the even index
SIBLINGS = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # ModelOpt gives them one weight_scale_2
ALONE = "model.layers.1.mlp.down_proj"  # left in 16 bits, as `ignore` says
LAYER = "model.layers.0.self_attn.q_proj"

# As modelopt 0.47 writes it: `convert_hf_quant_config_format`, and hf_quant_config.json that it is made of.
GROUP = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
IN_CONFIG = {
    "config_groups": {"group_0": {"input_activations": GROUP, "weights": GROUP, "targets": ["Linear"]}},
    "ignore": ["lm_head", ALONE],
    "quant_algo": "NVFP4",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quant_method": "modelopt",
}
SEPARATE = {
    "producer": {"name": "modelopt", "version": "0.23.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", ALONE],
    },
}


def _modelopt(weight: torch.Tensor, amax: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of one layer (N, K) with ModelOpt's arithmetic, and the weights that they mean, FP64."""
    scale_2 = amax.float() / (6 * 448)
    blocks = weight.float().unflatten(-1, (-1, 16))  # (N, K/16, 16)
    scale = blocks.abs().amax(-1) / (6 * scale_2)
    scale = torch.where(scale == 0, 1.0, scale).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    scaled = (blocks / (scale.float() * scale_2)[..., None]).double()
    index = ((scaled.abs()[..., None] - GRID).abs() - EVEN).argmin(-1)
    code = (index + 8 * (scaled < 0)).flatten(-2).to(torch.uint8)  # (N, K)
    meant = (scaled.sign() * GRID[index] * scale.double()[..., None] * scale_2.double()).flatten(-2)
    codes = code[:, 1::2] << 4 | code[:, 0::2]
    return {"weight": codes, "weight_scale": scale, "weight_scale_2": scale_2, "input_scale": torch.tensor(0.01)}, meant


def _publish(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Write architecture `name` to `folder` as ModelOpt does. Returns its plain tensors, with the weights meant."""
    tensors = load_file(build(name, folder) / "model.safetensors")
    packed, families = [key for key, weight in tensors.items() if _is_packed(key, weight)], {}
    for key in packed:
        parent, leaf, _ = key.rsplit(".", 2)
        families.setdefault((parent, SIBLINGS.get(leaf, leaf)), []).append(tensors[key].float().abs().max())
    stored, meant = dict(tensors), dict(tensors)
    for key in packed:
        parent, leaf, _ = key.rsplit(".", 2)
        amax = torch.stack(families[parent, SIBLINGS.get(leaf, leaf)]).max()
        parts, meant[key] = _modelopt(stored.pop(key), amax)
        stored |= {f"{parent}.{leaf}.{part}": tensor for part, tensor in parts.items()}
        if leaf in ("k_proj", "v_proj"):
            stored[f"{parent}.{leaf}.{leaf[0]}_scale"] = torch.tensor(0.5)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    _configure(folder, IN_CONFIG)
    return meant


def _is_packed(key: str, weight: torch.Tensor) -> bool:
    left = (".gate.", "vision", ALONE.removeprefix("model."))
    return weight.dim() == 2 and "layers." in key and not any(part in key for part in left)


def _configure(folder: Path, entry: dict[str, Any] | None) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    config |= {} if entry is None else {"quantization_config": entry}
    (folder / "config.json").write_text(json.dumps(config))


def _load(folder: Path, *words: str) -> tuple[Any, dict[str, LayerReport]]:
    words = ("model=hub", f"model.id={folder}", "model.dtype=float32", "device=cpu", *(words or ("quant=nvfp4",)))
    experiment = build_experiment(compose([*words]))
    model, _, reports, *_ = load_packed(
        experiment.model, experiment.quant, experiment.quantizer, experiment.task, None, "cpu"
    )
    return model, reports


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def _reference(folder: Path, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits of transformers' model with plain weights, in FP32."""
    save_file(
        {name: tensor.float() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    _configure(folder, None)
    return _logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("modelopt") / "llama"
    return folder, _publish("llama", folder)


@pytest.fixture
def folder(published: tuple[Path, Any], tmp_path: Path) -> Path:
    return shutil.copytree(published[0], tmp_path / "copy")


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe"])
def test_the_weights_of_modelopt_are_those_of_plain_arithmetic(name: str, tmp_path: Path) -> None:
    meant = _publish(name, tmp_path / "published")
    model, reports = _load(tmp_path / "published")
    packed = {path: module for path, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert reports.keys() == {p for p, m in model.named_modules() if isinstance(m, PackedLinear | PackedMatrices)}
    assert all(report.relative_error == 0 for report in reports.values())
    assert ALONE not in packed and "lm_head" not in packed and LAYER in packed
    text = {key.replace("language_model.", ""): weight for key, weight in meant.items()}
    if name != "qwen3_moe":
        assert torch.equal(model.get_submodule(ALONE).weight, text[f"{ALONE}.weight"].float())
    for path, layer in packed.items():
        assert torch.equal(layer.dequantized(), text[f"{path}.weight"].float()), path
    assert len(packed) == {"llama": 13, "gemma3": 13, "qwen3_moe": 8}[name]
    shutil.copytree(tmp_path / "published", tmp_path / "plain")
    torch.testing.assert_close(_logits(model), _reference(tmp_path / "plain", meant), rtol=1e-4, atol=1e-5)


def test_the_config_of_modelopt_may_lie_in_a_file_of_its_own(folder: Path) -> None:
    logits = _logits(_load(folder)[0])
    _configure(folder, None)
    (folder / "hf_quant_config.json").write_text(json.dumps(SEPARATE))
    assert torch.equal(_logits(_load(folder)[0]), logits)
    (folder / "hf_quant_config.json").write_text("no JSON")
    with pytest.raises(ConfigError, match=r"no readable hf_quant_config\.json"):
        _load(folder)


def test_one_line_says_what_is_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _load(folder)
    (line,) = [record.getMessage() for record in caplog.records if "Left out" in record.getMessage()]
    found = ("input_activations in 4 bits", "kv_cache_scheme", "13 tensors input_scale", "2 tensors k_scale")
    assert str(folder) in line and all(part in line for part in found)
    caplog.clear()
    _configure(folder, IN_CONFIG | {"kv_cache_scheme": None, "config_groups": {}})
    _edit(folder, lambda t: [t.pop(key) for key in list(t) if key.endswith(("input_scale", "k_scale", "v_scale"))])
    with caplog.at_level(logging.WARNING):
        _load(folder)
    assert "Left out" not in caplog.text


def test_modules_that_the_model_lacks_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A block for a later token, a tower beside the model, scales and angles of modules that are not in it."""
    before = _logits(_load(folder)[0])
    caplog.clear()
    foreign = (
        *("model.layers.99.mlp.down_proj.weight", "model.layers.99.norm.weight", "mtp.fc.weight"),
        *("model.layers.0.self_attn.attn.k_scale", "model.layers.0.self_attn.rotary_emb.inv_freq"),
    )
    _edit(folder, lambda t: t.update({name: torch.ones(2) for name in foreign}))
    with caplog.at_level(logging.WARNING):
        assert torch.equal(_logits(_load(folder)[0]), before)
    (line,) = [record.getMessage() for record in caplog.records if "Left out" in record.getMessage()]
    for found in ("2 tensors of model.layers.99", "1 tensors of mtp", "3 tensors k_scale", "1 tensors inv_freq"):
        assert found in line


def test_an_exported_modelopt_checkpoint_has_the_divisor_of_compressed_tensors(folder: Path) -> None:
    model, _ = _load(folder)
    exported, stored = dict(checkpoint_tensors(model)), load_file(folder / "model.safetensors")
    assert torch.equal(exported[f"{LAYER}.weight_packed"], stored[f"{LAYER}.weight"])
    divisor, multiplier = exported[f"{LAYER}.weight_global_scale"], stored[f"{LAYER}.weight_scale_2"]
    torch.testing.assert_close(divisor * multiplier, torch.ones(1), rtol=2**-23, atol=0)
    assert float(multiplier) < 1 < float(divisor)


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


ORIGINAL = "give the unquantized model"
EIGHT_BITS = {"weights": {"num_bits": 8, "type": "float"}, "targets": ["re:.*self_attn.*"]}
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "fp8": ({"quant_algo": "FP8"}, f"by modelopt as FP8; readable are .*NVFP4.*{ORIGINAL}"),
    "mixed": (
        {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4"}, LAYER: {"quant_algo": "FP8"}},
        },
        rf"as FP8 in quantized_layers\.{LAYER};.*{ORIGINAL}",
    ),
    "awq": ({"pre_quant_scale": True}, f"pre_quant_scale=True, .*{ORIGINAL}"),
    "unknown": ({"rotation": {"kind": "hadamard"}}, "rotation={'kind': 'hadamard'}"),
    "group": ({"config_groups": {"g": EIGHT_BITS}}, r"config_groups\.g\.weights\.num_bits=8"),
    "group of lists": ({"config_groups": {"NVFP4": ["Linear"]}}, "quantization config is not of modelopt"),
    "zero points": ({"config_groups": {"g": {"weights": {"symmetric": False}}}}, r"weights\.symmetric=False"),
    "blocks of 32": ({"group_size": 32}, "group_size=32"),
    "another tool": ({"quant_method": "quark"}, "packed by quark; readable are"),
}


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_a_config_that_means_other_weights_is_refused_by_name(folder: Path, kind: str) -> None:
    change, message = CONFIGS[kind]
    _configure(folder, IN_CONFIG | change)
    with pytest.raises(ConfigError, match=message):
        _load(folder)


@pytest.mark.parametrize("word", ["quant=bf16", "quant=mxfp4"])
def test_a_modelopt_checkpoint_has_one_format(folder: Path, word: str) -> None:
    with pytest.raises(ConfigError, match=r"is packed as NVFP4, and the run asks for .*; use quant=nvfp4"):
        _load(folder, word)


TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "scale of the inputs": (
        lambda t: t.update({f"{LAYER}.pre_quant_scale": torch.ones(64)}),
        f"tensor {LAYER}.pre_quant_scale is nothing that {LAYER} is known to have",
    ),
    "rotation that no layer has": (
        lambda t: t.update({"model.layers.0.self_attn.rotation.weight": torch.eye(64)}),
        rf"tensor model\.layers\.0\.self_attn\.rotation\.weight belongs to no layer.*{ORIGINAL}",
    ),
    "low rank beside it": (
        lambda t: t.update({f"{ALONE}.svdquant_lora_a": torch.ones(4, 128)}),
        f"{ALONE}.svdquant_lora_a is nothing",
    ),
    "fp8 layer": (
        lambda t: t.update({f"{ALONE}.weight": t[f"{ALONE}.weight"].to(torch.float8_e4m3fn)}),
        f"tensor {ALONE}.weight is stored as F8_E4M3.*{ORIGINAL}",
    ),
    "missing": (lambda t: t.pop(f"{LAYER}.weight_scale_2"), f"no tensor {LAYER}.weight_scale_2"),
    "many tensor scales": (
        lambda t: t.update({f"{LAYER}.weight_scale_2": torch.ones(4)}),
        rf"{LAYER}.weight_scale_2 has the shape \(4,\)",
    ),
    "scale of another dtype": (
        lambda t: t.update({f"{LAYER}.weight_scale": t[f"{LAYER}.weight_scale"].float()}),
        f"{LAYER}.weight_scale is stored as torch.float32",
    ),
    "not a number": (lambda t: t[f"{LAYER}.weight_scale"].view(torch.uint8)[0, :1].fill_(0x7F), f"{LAYER} has a scale"),
    "negative": (lambda t: t[f"{LAYER}.weight_scale"].view(torch.uint8)[0, :1].fill_(0x81), f"{LAYER} has a scale"),
    "zero": (lambda t: t[f"{LAYER}.weight_scale_2"].zero_(), f"{LAYER} has a scale"),
}


@pytest.mark.parametrize("kind", list(TENSORS))
def test_a_foreign_or_damaged_tensor_is_refused_by_name(folder: Path, kind: str) -> None:
    change, message = TENSORS[kind]
    _edit(folder, change)
    with pytest.raises(ConfigError, match=message):
        _load(folder)


def test_a_packed_head_is_refused(tmp_path: Path) -> None:
    _publish("mistral", tmp_path / "untied")
    head = load_file(tmp_path / "untied" / "model.safetensors")["lm_head.weight"]
    parts, _ = _modelopt(head, head.float().abs().max())
    _edit(tmp_path / "untied", lambda t: t.update({f"lm_head.{part}": tensor for part, tensor in parts.items()}))
    with pytest.raises(ConfigError, match="has a packed head, lm_head"):
        _load(tmp_path / "untied")


def test_fp8_without_a_word_is_not_read_as_numbers(folder: Path) -> None:
    tensors = load_file(build("llama", folder) / "model.safetensors")
    _configure(folder, None)
    save_file(tensors | {f"{LAYER}.weight": tensors[f"{LAYER}.weight"].to(torch.float8_e4m3fn)},
              folder / "model.safetensors", {"format": "pt"})  # fmt: skip
    with pytest.raises(ConfigError, match=f"tensor {LAYER}.weight is stored as F8_E4M3"):
        _load(folder)


# --- compressed-tensors, with its own library -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A W4A4 folder that compressed-tensors packed, and the plain tensors that it unpacks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("compressed_tensors")
        from compressed_tensors.compressors import NVFP4PackedCompressor
        from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    folder = build("llama", tmp_path_factory.mktemp("compressed") / "llama")
    scheme = preset_name_to_scheme("NVFP4", ["Linear"])
    assert scheme.input_activations is not None
    scheme.format = "nvfp4-pack-quantized"  # type: ignore[assignment]  # as llm-compressor fills it in
    stored, meant = {}, {}
    for key, weight in load_file(folder / "model.safetensors").items():
        layer = key.removesuffix(".weight")
        if not _is_packed(key, weight):
            stored[key] = meant[key] = weight
            continue
        divisor = generate_gparam(weight.min(), weight.max()).float()
        low, high = weight.unflatten(-1, (-1, 16)).aminmax(dim=-1)
        scale, _ = calculate_qparams(low, high, scheme.weights, divisor)
        tensors = {"weight": weight, "weight_scale": scale, "weight_global_scale": divisor}
        packed = NVFP4PackedCompressor.compress(tensors, scheme)
        meant[key] = NVFP4PackedCompressor.decompress(packed, scheme)["weight"]
        stored |= {f"{layer}.{part}": tensor for part, tensor in packed.items()}
        stored[f"{layer}.input_global_scale"] = torch.tensor([300.0])
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format="nvfp4-pack-quantized", quantization_status="compressed",
        ignore=["lm_head", ALONE], kv_cache_scheme={"num_bits": 8, "type": "float"},
    )  # fmt: skip
    _configure(folder, json.loads(config.model_dump_json()) | {"sparsity_config": {}, "transform_config": {}})
    return folder, meant


@pytest.mark.peers
def test_the_weights_of_w4a4_are_those_of_compressed_tensors(
    compressed: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, meant = compressed
    with caplog.at_level(logging.WARNING):
        model, reports = _load(folder)
    line = next(record.getMessage() for record in caplog.records if "Left out" in record.getMessage())
    found = ("input_activations in 4 bits", "kv_cache_scheme", "13 tensors input_global_scale")
    assert all(part in line for part in found)
    assert len(reports) == 13 and ALONE not in reports
    for path in reports:
        weight = model.get_submodule(path).dequantized()
        assert not bool((weight == 0).all())
        torch.testing.assert_close(weight, meant[f"{path}.weight"].float(), rtol=2**-8, atol=0)
    shutil.copytree(folder, tmp_path / "plain")
    unpacked = {f"{path}.weight": model.get_submodule(path).dequantized() for path in reports}
    logits = _reference(tmp_path / "plain", meant | unpacked)
    torch.testing.assert_close(_logits(model), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.peers
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform_config=.*hadamard"),
        ({"format": "float-quantized"}, "as float-quantized, .*quant=nvfp4; use quant=fp8"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config=.*sparse-24-bitmask"),
    ],
)
def test_a_transformed_or_sparse_checkpoint_is_refused_by_name(
    compressed: tuple[Path, Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(compressed[0], tmp_path / "copy")
    _configure(folder, json.loads((folder / "config.json").read_text())["quantization_config"] | change)
    with pytest.raises(ConfigError, match=message):
        _load(folder)


@pytest.mark.peers
def test_a_group_in_another_format_is_refused_by_name(compressed: tuple[Path, Any], tmp_path: Path) -> None:
    folder = shutil.copytree(compressed[0], tmp_path / "copy")
    entry = json.loads((folder / "config.json").read_text())["quantization_config"]
    entry["config_groups"]["group_1"] = EIGHT_BITS | {"format": "float-quantized"}
    _configure(folder, entry)
    with pytest.raises(ConfigError, match=r"config_groups\.group_1\.format=float-quantized"):
        _load(folder)
    _configure(folder, entry | {"format": "mixed-precision"})
    with pytest.raises(ConfigError, match="mixes nvfp4-pack-quantized and float-quantized"):
        _load(folder)
