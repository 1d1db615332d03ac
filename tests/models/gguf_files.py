"""Writes tiny GGUF files as llama.cpp's converter does, with the gguf package, from models of transformers.

Names of tensors come from that package's own table. What llama.cpp changes is changed here: rows of query and key of
Llama in the order of its rotation, and 1 added to Gemma's norms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFWriter,
    dequantize,
    get_tensor_name_map,
    quantize,
)
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = 260
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.05,
}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
GEMMA = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "num_hidden_layers": 6,
    "initializer_range": 0.02,
}


def model_of(model_type: str, tied: bool = True, seed: int = 0, **changes: Any) -> Any:
    """A random model of transformers in FP32, every norm scale and bias drawn too."""
    rope = {"rope_parameters": PLAIN} if model_type != "gemma3_text" else GEMMA
    values = SHAPE | rope | {"tie_word_embeddings": tied} | changes
    if model_type == "gemma3_text":
        values = {"query_pre_attn_scalar": values["head_dim"]} | values
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data = torch.randn_like(parameter) * 0.1 + (
                0.0 if "bias" in name or "gemma" in model_type else 1.0
            )
    return model.eval()


def random_blocks(kind: str, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Bytes (rows, bytes of a row) of blocks with random codes and scales, of weights of about 0.05."""
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows * width // weights, size), dtype=np.uint8)
    for at in {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(
        kind, (0, 2) if kind.endswith("_1") else (0,)
    ):
        scales = random.uniform(1e-4, 3e-4, len(blocks)) * {
            "Q2_K": 5,
            "Q3_K": 1,
            "Q6_K": 0.05,
            "Q4_K": 0.5,
            "Q5_K": 0.25,
            "IQ4_XS": 0.1,
        }.get(kind, 20)
        blocks[:, at : at + 2] = scales.astype("<f2")[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def rotated(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp has them in Llama's query and key: those that rotate together side by side."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def unrotated(weight: np.ndarray, heads: int) -> np.ndarray:
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def tokenizer_keys(**changes: Any) -> dict[str, Any]:
    """A byte-level tokenizer of 256 bytes and SPECIAL, without merges but one."""
    return {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": [*BYTES, "th", *SPECIAL],
        "token_type": [1] * 257 + [3] * 3,
        "merges": ["t h"],
        "eos_token_id": 259,
        "bos_token_id": 257,
        "padding_token_id": 257,
        "add_bos_token": False,
    } | changes


def write(
    path: Path,
    model: Any,
    kinds: Mapping[str, str] | str = "F32",
    keys: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    raw_head: tuple[np.ndarray, str] | None = None,
    template: str | None = TEMPLATE,
    drop: Sequence[str] = (),
    packed: Mapping[str, tuple[np.ndarray, str]] | None = None,
) -> Path:
    """Write `model`; `kinds` is the type of its matrices, by name or one for all. The model gets the rounded ones.

    `keys` are added to the metadata of the architecture, or replace them; None leaves one out. `raw_head` are the bytes
    and type of an output matrix apart, `packed` those of further tensors by name.
    """
    config = model.config
    arch = {"gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    writer = GGUFWriter(path, arch)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope["rope_theta"],
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }
    if arch == "gemma3":
        values["attention.sliding_window"] = config.sliding_window
    for key, value in {**values, **(keys or {})}.items():
        _add(writer, key if "." in key and key.startswith(("split", "general")) else f"{arch}.{key}", value)
    for key, value in (tokenizer_keys() if tokenizer is None else tokenizer).items():
        _add(writer, f"tokenizer.ggml.{key}", value)
    if template is not None:
        writer.add_chat_template(template)
    names = get_tensor_name_map(MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        base, _, leaf = name.rpartition(".")
        called = f"{names.get_name(base)}.{leaf}"
        weight = parameter.detach().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(base.split(".")[-1])
        turn = arch == "llama" and heads is not None
        weight = rotated(weight, heads) if turn else weight + 1 if arch == "gemma3" and "norm" in name else weight
        kind = "F32" if weight.ndim == 1 else kinds if isinstance(kinds, str) else kinds.get(called, "F32")
        if called in drop:
            continue
        if kind == "F32":
            writer.add_tensor(called, np.ascontiguousarray(weight, dtype=np.float32))
            continue
        number = GGMLQuantizationType[kind]
        made = kind.endswith("_K")  # the package does not quantize to these
        raw = random_blocks(kind, *weight.shape, seed=len(called)) if made else quantize(weight, number)
        writer.add_tensor(called, raw, raw_dtype=number)
        back = dequantize(raw, number)
        parameter.data = torch.from_numpy(np.ascontiguousarray(unrotated(back, heads) if turn else back))
    if raw_head is not None:
        writer.add_tensor("output.weight", raw_head[0], raw_dtype=GGMLQuantizationType[raw_head[1]])
    for name, (raw, kind) in (packed or {}).items():
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind])
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, list):
        writer.add_array(key, value) if value else None
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
