"""FP8 with a scale for each 128 x 128 weights, as DeepSeek and Qwen publish it; equal to transformers' reading."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from qerl_bench.config import build, compose
from qerl_bench.model.load import load_packed
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quant.matrices import PackedMatrices
from qerl_core.checks import ConfigError
from tests.models.builds import write_tokenizer

LAYER = "model.layers.0.self_attn.q_proj"
SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "pad_token_id": 256, "bos_token_id": 258, "eos_token_id": 257,
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "decoder_sparse_step": 1}
ENTRY = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}  # fmt: skip


def publish(folder: Path, kind: str, scale_dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    """A model whose matrices in blocks are random codes under random scales. Keys have 64 rows: half a square."""
    config = AutoConfig.for_model(kind, **SHAPE | more)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    generator, stored = torch.Generator().manual_seed(1), {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.dim() != 2 or "layers." not in name or name.endswith("mlp.gate.weight"):
            stored[name] = tensor
            continue
        rows, width = tensor.shape
        codes = torch.randn(tensor.shape, generator=generator) * 60
        stored[name] = codes.clamp(-448, 448).to(torch.float8_e4m3fn)
        squares = (-(-rows // 128), width // 128)
        stored[f"{name}_scale_inv"] = (torch.rand(squares, generator=generator) * 1e-3 + 1e-4).to(scale_dtype)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    configure(folder, {})
    return folder


def configure(folder: Path, change: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {key: value for key, value in (ENTRY | change).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def load(folder: Path, *words: str, dtype: str = "bfloat16") -> Any:
    chosen = ("model=hub", f"model.id={folder}", f"model.dtype={dtype}", "device=cpu", "quant=fp8")
    experiment = build(compose([*chosen, *(words or ("quant.block=128x128",))]))
    parts = experiment.model, experiment.quant, experiment.quantizer, experiment.task
    return load_packed(*parts, None, "cpu")[0]


def theirs(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """By transformers, which reads the size of a block from the shapes: whole squares only."""
    return Fp8Dequantize(SimpleNamespace())._dequantize_one(codes, scales, dtype)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_are_those_of_transformers(tmp_path: Path, dtype: str, scale_dtype: torch.dtype) -> None:
    folder = publish(tmp_path / "qwen3", "qwen3", scale_dtype)
    model, stored = load(folder, dtype=dtype), load_file(folder / "model.safetensors")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}
    assert len(layers) == 7 and not isinstance(model.lm_head, PackedLinear)
    for name, layer in layers.items():
        codes, scales = stored[f"{name}.weight"], stored[f"{name}.weight_scale_inv"]
        if len(codes) % 128:  # keys and values: the square goes on below them
            assert codes.shape == (64, 128) and scales.shape == (1, 1)
        wanted = theirs(codes, scales, getattr(torch, dtype))
        assert torch.equal(layer.operand(getattr(torch, dtype)), wanted), name


def test_one_weight_by_hand(tmp_path: Path) -> None:
    """Code 0x7E is 448 and 0xB8 is -1; the scale of rows from 128 on is 2^-9, and it multiplies."""
    folder = publish(tmp_path / "qwen3", "qwen3")
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.mlp.gate_proj"
    tensors[f"{name}.weight"].view(torch.uint8)[128, :2] = torch.tensor([0x7E, 0xB8], dtype=torch.uint8)
    tensors[f"{name}.weight_scale_inv"] = torch.tensor([[1.0], [2.0**-9]])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found = load(folder, dtype="float32").get_submodule(name).dequantized()
    assert found[128, :2].tolist() == [448 / 512, -1 / 512]


def test_experts_keep_the_squares_of_their_matrices(tmp_path: Path) -> None:
    folder = publish(tmp_path / "moe", "qwen3_moe", moe_intermediate_size=256, **EXPERTS)
    model, stored = load(folder), load_file(folder / "model.safetensors")
    path = "model.layers.0.mlp.experts"
    experts = model.get_submodule(path)
    packed = {name: one for name, one in experts.named_modules() if isinstance(one, PackedMatrices)}
    assert len(packed) == 2
    for expert in range(2):
        parts = {
            leaf: theirs(
                stored[f"{path}.{expert}.{leaf}.weight"], stored[f"{path}.{expert}.{leaf}.weight_scale_inv"],
                torch.float32,
            )
            for leaf in ("gate_proj", "up_proj", "down_proj")
        }  # fmt: skip
        wanted = {"gate_up_proj": torch.cat([parts["gate_proj"], parts["up_proj"]]), "down_proj": parts["down_proj"]}
        for name, module in packed.items():
            leaf = next(leaf for leaf in wanted if leaf in name)
            assert torch.equal(module.dequantized(expert), wanted[leaf]), name


def test_squares_that_cross_from_gate_into_up_are_refused(tmp_path: Path) -> None:
    folder = publish(tmp_path / "moe", "qwen3_moe", moe_intermediate_size=128 + 64, **EXPERTS)
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj have scales for squares of 128 rows, which cross"):
        load(folder)


def test_one_line_says_that_inputs_are_not_rounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(publish(tmp_path / "qwen3", "qwen3"))
    assert "only its weights are used. Left out: activation_scheme=dynamic" in caplog.text


ORIGINAL = "give the unquantized model"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_block_size": None}, f"as fp8 with weight_block_size=None, fmt=e4m3; .*128 x 128, {ORIGINAL}"),
        ({"weight_block_size": [64, 128]}, r"weight_block_size=\[64, 128\]"),
        ({"fmt": "e5m2"}, "fmt=e5m2"),
        ({"expert_dtype": "fp4"}, "expert_dtype=fp4, which nothing here can read"),
    ],
)
def test_another_fp8_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = publish(tmp_path / "qwen3", "qwen3")
    configure(folder, change)
    with pytest.raises(ConfigError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("quant.block=row",), r"another size; use quant\.block=128x128"),
        (("quant=bf16",), "is packed as fp8, and the run asks for quant=bf16; use quant=fp8"),
    ],
)
def test_the_right_words_are_said(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(publish(tmp_path / "qwen3", "qwen3"), *words)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{LAYER}.weight_scale_inv"), f"{LAYER}.weight_scale_inv"),
        (lambda t: t.update({f"{LAYER}.weight_scale_inv": torch.ones(2, 2)}), r"_scale_inv has the shape \(2, 2\)"),
        (
            lambda t: t.update({f"{LAYER}.weight_scale_inv": torch.ones(1, 1).to(torch.float8_e8m0fnu)}),
            f"{LAYER} has .*scales of integers or powers of two",
        ),
        (lambda t: t.update({f"{LAYER}.weight_scale": torch.ones(1)}), f"{LAYER}.weight_scale is nothing"),
    ],
)
def test_a_foreign_or_damaged_tensor_is_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    folder = publish(tmp_path / "qwen3", "qwen3")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        load(folder)
