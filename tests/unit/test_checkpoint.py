"""Checkpoints both ways: what is written is read back bit for bit, and what is damaged is refused by name."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from qerl_bench.commands.export import main, parse_words
from qerl_bench.config import build, compose
from qerl_bench.model.base import moved_to
from qerl_bench.model.byte_tokenizer import byte_tokenizer
from qerl_bench.model.load import load_packed
from qerl_bench.quant import export as exporting
from qerl_bench.quant.checkpoint import CheckpointReader, skeleton
from qerl_bench.quant.checkpoint_mapping import Source
from qerl_bench.quant.export import export
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quant.packed_checkpoint import read_packed
from qerl_bench.quantizer.apply import quantize_model
from qerl_core.checks import ConfigError
from tests.failing import shortages
from tests.weight_formats import FORMATS

IDS = torch.tensor([[3, 200, 17, 44, 101, 7]])


def _model(tied: bool = True, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 262,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
        "eos_token_id": 257,
        "pad_token_id": 256,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**sizes)) if tied else LlamaForCausalLM(LlamaConfig(**sizes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return moved_to(model, "cpu", torch.bfloat16).eval()


def _plain(folder: Path, tied: bool = True, **options: Any) -> Path:
    _model(tied).save_pretrained(folder, **options)
    byte_tokenizer().save_pretrained(folder)
    return folder


def _packed(spec: Any, tied: bool = True) -> Any:
    model = _model(tied)
    quantize_model(model, spec)
    return model


def _bytes_of(model: torch.nn.Module) -> dict[str, list[int]]:
    found = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    return {name: tensor.contiguous().view(torch.uint8).flatten().tolist() for name, tensor in found.items()}


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", list(FORMATS))
def test_what_is_exported_comes_back_bit_for_bit(tmp_path: Path, kind: str, tied: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(exporting, "SHARD_BYTES", 60_000)
    model = _packed(FORMATS[kind], tied)
    export(model, byte_tokenizer(), FORMATS[kind], tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    found = read_packed(tmp_path / "out", FORMATS[kind], torch.bfloat16, "cpu")
    assert _bytes_of(found) == _bytes_of(model)
    assert torch.equal(_logits(found), _logits(model))
    assert not any(tensor.is_meta for tensor in (*found.parameters(), *found.buffers()))
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == tied
    assert found.generation_config.eos_token_id == 257
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_names_and_sizes_of_an_exported_layer(tmp_path: Path) -> None:
    for kind, spec in FORMATS.items():
        export(_packed(spec), byte_tokenizer(), spec, tmp_path / kind)
    layers = {
        kind: {
            name.removeprefix("model.layers.0.mlp.up_proj."): (tuple(tensor.shape), tensor.dtype)
            for name, tensor in load_file(tmp_path / kind / "model.safetensors").items()
            if name.startswith("model.layers.0.mlp.up_proj")
        }
        for kind in FORMATS
    }
    assert layers["nvfp4"] == {
        "weight_packed": ((128, 32), torch.uint8),
        "weight_scale": ((128, 4), torch.float8_e4m3fn),
        "weight_global_scale": ((1,), torch.float32),
    }
    assert layers["mxfp4"] == {"weight_packed": ((128, 32), torch.uint8), "weight_scale": ((128, 2), torch.uint8)}
    assert layers["fp8"] == {"weight": ((128, 64), torch.float8_e4m3fn), "weight_scale": ((128, 1), torch.bfloat16)}
    assert layers["mxfp8"] == {"weight": ((128, 64), torch.float8_e4m3fn), "weight_scale": ((128, 2), torch.uint8)}
    shape = {"weight_shape": ((2,), torch.int64)}
    rows, groups = (128, 1), (128, 2)
    assert layers["int8"] == shape | {
        "weight_packed": ((128, 16), torch.int32),
        "weight_scale": (rows, torch.bfloat16),
    }
    assert layers["int4"] == shape | {
        "weight_packed": ((128, 8), torch.int32),
        "weight_scale": (groups, torch.bfloat16),
    }
    assert set(layers["nf4"]) == {"weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"}
    assert set(layers["nf4-double"]) - set(layers["nf4"]) == {"weight.nested_absmax", "weight.nested_quant_map"}
    assert layers["nf4-double"]["weight.absmax"] == ((128,), torch.uint8)


@pytest.mark.peers
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "fp8", "int8", "int4", "mxfp8"])
def test_transformers_and_compressed_tensors_read_the_same_weights(tmp_path: Path, kind: str, tied: bool) -> None:
    model = _packed(FORMATS[kind], tied)
    export(model, byte_tokenizer(), FORMATS[kind], tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("compressed_tensors")
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
        logits = _logits(theirs)
    for name, layer in model.named_modules():
        if isinstance(layer, PackedLinear):
            weight = theirs.get_submodule(name).weight
            assert weight.dtype == torch.bfloat16
            # Theirs is code x (scale / G) in FP32, rounded to BF16; ours stays FP32 and may lie an FP32 ulp beside it.
            torch.testing.assert_close(weight.float(), layer.dequantized(), rtol=2**-8, atol=0)
            exact = layer.dequantized().bfloat16()
            assert float((weight != exact).float().mean()) < 1e-3
    torch.testing.assert_close(logits, _logits(model), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("kind", ["nf4", "nf4-double"])
def test_transformers_and_bitsandbytes_read_the_same_weights(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.functional import dequantize_4bit

    model = _packed(FORMATS[kind])
    export(model, byte_tokenizer(), FORMATS[kind], tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, device_map="cpu").eval()
        for name, layer in model.named_modules():
            if isinstance(layer, PackedLinear):
                other = theirs.get_submodule(name)
                restored = dequantize_4bit(other.weight.data, other.weight.quant_state)
                assert torch.equal(restored, layer.operand(torch.bfloat16))
        torch.testing.assert_close(_logits(theirs), _logits(model), rtol=0.05, atol=0.02)


# --- reading plain checkpoints block by block -------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [None, "60KB"])
def test_packing_while_reading_gives_the_model_packed_after_loading(tmp_path: Path, tied: bool, shards: Any) -> None:
    folder = _plain(tmp_path / "plain", tied, **({"max_shard_size": shards} if shards else {}))
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shards is not None)
    weights, model = CheckpointReader(folder, "cpu"), skeleton(folder, torch.bfloat16)
    reports = quantize_model(model, FORMATS["nvfp4"], source=weights).reports
    whole = _packed(FORMATS["nvfp4"], tied)
    assert _bytes_of(model) == _bytes_of(whole)
    assert torch.equal(_logits(model), _logits(whole))
    assert reports == quantize_model(_model(tied), FORMATS["nvfp4"]).reports
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_blocks_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _plain(tmp_path / "plain")
    weights, model = CheckpointReader(folder, "cpu"), skeleton(folder, torch.bfloat16)
    read: list[str] = []
    resident: list[int] = []
    original = CheckpointReader.fill

    def fill(self: CheckpointReader, owner: torch.nn.Module, names: Any) -> None:
        read.extend(names)
        original(self, owner, names)
        linears = [m for m in owner.model.layers.modules() if isinstance(m, torch.nn.Linear)]
        resident.append(sum(not isinstance(m, PackedLinear) and not m.weight.is_meta for m in linears))

    monkeypatch.setattr(CheckpointReader, "fill", fill)
    quantize_model(model, FORMATS["nvfp4"], source=weights)
    assert resident == [0, 7, 7]  # embeddings first, then never more than one block's matrices
    assert sorted(read) == sorted(name for name, _ in _model().named_parameters())


def test_the_harness_loads_plain_and_packed_folders(tmp_path: Path) -> None:
    plain = _plain(tmp_path / "plain")

    def load(model: Path, *words: str) -> tuple[Any, Any, Any]:
        chosen = ["model=qwen2.5-0.5b-instruct", f"model.id={model}", "device=cpu", *words]
        experiment = build(compose(chosen))
        loaded = load_packed(experiment.model, experiment.quant, experiment.quantizer, experiment.task, None, "cpu")
        return loaded.model, loaded.tokenizer, loaded.layers

    ours, tokenizer, reports = load(plain, "quant=nvfp4")
    assert _bytes_of(ours) == _bytes_of(_packed(FORMATS["nvfp4"]))
    assert tokenizer.eos_token == "<|end|>" and len(reports) == 14
    assert all(report.relative_error > 0.05 for report in reports.values())
    export(ours, tokenizer, FORMATS["nvfp4"], tmp_path / "packed")
    again, _, reports = load(tmp_path / "packed", "quant=nvfp4")
    assert _bytes_of(again) == _bytes_of(ours)
    assert len(reports) == 14 and all(report.relative_error == 0 for report in reports.values())
    unpacked, _, _ = load(plain, "quant=bf16")
    assert torch.equal(_logits(unpacked), _logits(_model()))
    with pytest.raises(
        ConfigError, match="packed as nvfp4-pack-quantized, and the run asks for quant=bf16; use quant=nvfp4"
    ):
        load(tmp_path / "packed", "quant=bf16")
    with pytest.raises(ConfigError, match="is packed already, so quantizer=mse"):
        load(tmp_path / "packed", "quant=nvfp4", "quantizer=mse")


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export(_packed(FORMATS["nvfp4"]), byte_tokenizer(), FORMATS["nvfp4"], tmp_path / "packed")
    return tmp_path / "packed"


def _edit(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


NAME = "model.layers.1.mlp.down_proj"
DAMAGE = {
    "missing": (lambda t: t.pop(f"{NAME}.weight_scale"), f"no tensor {NAME}.weight_scale"),
    "missing norm": (lambda t: t.pop("model.norm.weight"), "lacks 1 of .* model.norm.weight"),
    "shape": (
        lambda t: t.update({f"{NAME}.weight_packed": torch.zeros(64, 32, dtype=torch.uint8)}),
        f"{NAME}.weight_packed has the shape",
    ),
    "dtype": (
        lambda t: t.update({f"{NAME}.weight_scale": torch.zeros(64, 8)}),
        f"{NAME}.weight_scale is stored as torch.float32",
    ),
    "nan": (lambda t: t[f"{NAME}.weight_scale"].view(torch.uint8)[0, :1].fill_(0x7F), f"{NAME} has a scale"),
    "zero": (lambda t: t[f"{NAME}.weight_global_scale"].zero_(), f"{NAME} has a scale"),
}


@pytest.mark.parametrize("kind", list(DAMAGE))
def test_a_damaged_tensor_is_refused_by_name(folder: Path, kind: str) -> None:
    change, message = DAMAGE[kind]
    _edit(folder, change)
    with pytest.raises(ConfigError, match=message):
        read_packed(folder, FORMATS["nvfp4"], torch.bfloat16, "cpu")


def test_a_card_that_is_full_while_tensors_are_read_makes_no_damaged_file(folder: Path) -> None:
    with shortages(Source, "make", 2), pytest.raises(torch.OutOfMemoryError):
        read_packed(folder, FORMATS["nvfp4"], torch.bfloat16, "cpu")


@pytest.mark.parametrize(
    ("keep", "message"), [(-1, "cut short: tensor model"), (100, "cut short inside its header"), (4, "cut short")]
)
def test_a_file_that_is_cut_short_is_refused(folder: Path, keep: int, message: str) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=message):
        read_packed(folder, FORMATS["nvfp4"], torch.bfloat16, "cpu")


def test_what_is_no_checkpoint_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"gone.weight": "x"}}))
    with pytest.raises(ConfigError, match=r"index.*gone\.weight"):
        CheckpointReader(folder, "cpu")
    (folder / "model.safetensors.index.json").unlink()
    shutil.copy(path, folder / "second.safetensors")
    weight_map = {"model.norm.weight": "model.safetensors", f"{NAME}.weight_packed": "second.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match="is in two files"):
        CheckpointReader(folder, "cpu")
    for header in (b"not a header at all.", b'["not one of names"]', b'{"w": {"dtype": 1}} '):
        (folder / "second.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(9))
        with pytest.raises(ConfigError, match="no readable safetensors header"):
            CheckpointReader(folder, "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format="marlin-24"), "by compressed-tensors as marlin-24; readable are"),
        (lambda c: c.update(format="int-quantized"), "as int-quantized with num_bits=4, .* give the unquantized model"),
        (lambda c: c.update(quant_method="gptq"), "by gptq"),
        (lambda c: c.update(format="mxfp4-pack-quantized"), "use quant=mxfp4"),
    ],
)
def test_other_packings_are_refused(folder: Path, change: Any, message: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        read_packed(folder, FORMATS["nvfp4"], torch.bfloat16, "cpu")


def test_a_checkpoint_that_quantizes_activations_too_gives_its_weights(folder: Path) -> None:
    """W4A4, as llm-compressor writes it: tests/models/test_packed_checkpoints.py compares with its own library."""
    weights = _bytes_of(read_packed(folder, FORMATS["nvfp4"], torch.bfloat16, "cpu"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {"num_bits": 4, "dynamic": "local"}
    (folder / "config.json").write_text(json.dumps(config))
    _edit(folder, lambda tensors: tensors.update({f"{NAME}.input_global_scale": torch.tensor([300.0])}))
    assert _bytes_of(read_packed(folder, FORMATS["nvfp4"], torch.bfloat16, "cpu")) == weights


def test_a_plain_tensor_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    folder = _plain(tmp_path / "plain")
    _edit(folder, lambda tensors: tensors[f"{NAME}.weight"].view(-1)[5:6].fill_(float("nan")))
    with pytest.raises(ConfigError, match=f"^{folder}/model.safetensors: 1 of .* tensor {NAME}.weight are NaN"):
        quantize_model(skeleton(folder, torch.bfloat16), FORMATS["nvfp4"], source=CheckpointReader(folder, "cpu"))


def test_double_quantization_must_agree(tmp_path: Path) -> None:
    export(_packed(FORMATS["nf4-double"]), byte_tokenizer(), FORMATS["nf4-double"], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"use quant\.double_quant=true"):
        read_packed(tmp_path / "out", FORMATS["nf4"], torch.bfloat16, "cpu")


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_exports_a_model_and_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, out = _plain(tmp_path / "plain"), tmp_path / "deep" / "out"
    main(
        [
            f"model={plain}",
            "quant=nvfp4",
            f"out={out}",
            "quantizer=gptq",
            "quantizer.calibration.samples=8",
            "device=cpu",
        ]
    )
    assert "14 layers as nvfp4 (gptq)" in capsys.readouterr().out
    assert {"config.json", "model.safetensors", "tokenizer.json", "layers.parquet"} <= {p.name for p in out.iterdir()}
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head"] and config["format"] == "nvfp4-pack-quantized"
    read_packed(out, FORMATS["nvfp4"], torch.bfloat16, "cpu")
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        main([f"model={plain}", "quant=nvfp4", f"out={out}"])


def test_the_command_knows_models_by_name_and_by_place() -> None:
    words, out = parse_words(["model=tiny", "quant=mxfp4", "out=here", "model.warm_start_steps=0"])
    assert out == Path("here")
    spec = build(compose(words)).model
    assert (spec.name, spec.dtype, spec.warm_start_steps) == ("tiny", "bfloat16", 0)
    spec = build(compose(parse_words(["model=/some/where", "quant=mxfp4", "out=here"])[0])).model
    assert (spec.id, spec.dtype) == ("/some/where", "bfloat16")
    with pytest.raises(ConfigError, match=r"usage: .* model=PATH_OR_ID"):
        parse_words(["quant=mxfp4"])
    with pytest.raises(ConfigError, match="packs nothing"):
        main(["model=tiny", "quant=bf16", "out=nowhere"])
