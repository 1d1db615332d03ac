"""What a GGUF file says of its architecture: config.json, and the place of each tensor in the model.

Four architectures, each complete: a metadata key or a tensor that is not in the lists here is refused by its name,
since it may change what the model computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qerl_bench.model.gguf.header import SCALED, Header, scale_of
from qerl_bench.model.gguf.rope import FREQUENCIES, KEYS, rope_parameters, shortest
from qerl_core.checks import is_number, require

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
TOP = {EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}
_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_BIASES = {f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"}
_HEAD_NORMS = {f"attn_{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"}
_GEMMA_NORMS = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_KEYS = KEYS | {
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "vocab_size",
}
_GEMMA_KEYS = {"attention.sliding_window", "attention.sliding_window_pattern"}
# Words, truth values, a pattern of layers, a factor of 0 for none, and what the tokens themselves say.
_NO_SIZES = {"rope.scaling.type", "rope.scaling.finetuned", "rope.scaling.factor", "vocab_size"} | {
    "attention.sliding_window_pattern"
}
_WINDOW_PATTERN = 6  # of Gemma 3: each sixth block attends to everything
_BLOCKS_OF_27B = 62  # the one Gemma 3 that divides queries by another number than its head's


@dataclass(frozen=True)
class Architecture:
    """How a file's architecture is called by transformers, and its parts: name in the file -> name in the model."""

    model_type: str
    class_name: str
    block: Mapping[str, str]
    permuted: bool = False  # rows of query and key in the order of llama.cpp's rotation
    norm_offset: float = 0.0  # what the file has added to the scales of norms
    keys: frozenset[str] = _KEYS


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _BLOCK, permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _BLOCK | _BIASES),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _BLOCK | _HEAD_NORMS),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _BLOCK | _HEAD_NORMS | _GEMMA_NORMS,
        norm_offset=1.0,
        keys=_KEYS | _GEMMA_KEYS,
    ),
}


def architecture_of(header: Header) -> Architecture:
    name = header.architecture
    require(
        name in ARCHITECTURES,
        f"model.id={header.path} has general.architecture={name}; readable are {', '.join(ARCHITECTURES)}. Give the "
        "model as safetensors: model.id=ORG/NAME or a folder",
    )
    return ARCHITECTURES[name]


def config_of(header: Header) -> dict[str, Any]:
    """config.json of the model, but for its tied head, stop tokens and dtype.

    Raises ConfigError for an architecture, a key or a tensor that is not known, or sizes that do not fit the tensors.
    """
    architecture, path = architecture_of(header), header.path
    prefix = f"{header.architecture}."
    values = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    for key, value in values.items():
        require(
            key in architecture.keys,
            f"model.id={path}: {prefix}{key}={value} is not known of this architecture, and may change what the model "
            "computes; give the model as safetensors",
        )
        require(
            key in _NO_SIZES or (is_number(value) and value > 0),
            f"model.id={path}: {prefix}{key}={value} is no single number above 0; choose another file",
        )
    sizes = {key: header.need(f"{prefix}{key}") for key in ("embedding_length", "block_count", "feed_forward_length")}
    heads = header.need(f"{prefix}attention.head_count")
    kv_heads = values.get("attention.head_count_kv", heads)
    for key, value in {**sizes, "attention.head_count": heads, "attention.head_count_kv": kv_heads}.items():
        require(isinstance(value, int) and value > 0, f"model.id={path}: {prefix}{key}={value} is no single number")
    require(
        sizes["block_count"] <= len(header.tensors),
        f"model.id={path}: {prefix}block_count={sizes['block_count']} is more than its {len(header.tensors)} tensors; "
        "choose another file",
    )
    head_dim = values.get("attention.key_length", sizes["embedding_length"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        require(
            values.get(key, head_dim) == head_dim,
            f"model.id={path}: {prefix}{key}={values.get(key)} is not the length of a head, {head_dim}; such a model "
            "is not read, give it as safetensors",
        )
    config = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": _vocabulary(header),
        "hidden_size": sizes["embedding_length"],
        "intermediate_size": sizes["feed_forward_length"],
        "num_hidden_layers": sizes["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": shortest(header.need(f"{prefix}attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": header.need(f"{prefix}context_length"),
        "rope_parameters": rope_parameters(header, head_dim),
    }
    if header.architecture == "gemma3":
        config |= _gemma3(header, config, values)
    check_tensors(header, config)
    return config


def _gemma3(header: Header, config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    blocks, pattern = config["num_hidden_layers"], values.get("attention.sliding_window_pattern", _WINDOW_PATTERN)
    require(
        isinstance(pattern, int) and pattern > 0,
        f"model.id={header.path}: gemma3.attention.sliding_window_pattern={pattern} is no single number; give the "
        "model as safetensors",
    )
    of_27b = config["hidden_size"] // config["num_attention_heads"]
    return {
        "sliding_window": header.need("gemma3.attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if number % pattern else "full_attention" for number in range(1, blocks + 1)
        ],
        "query_pre_attn_scalar": of_27b if blocks == _BLOCKS_OF_27B else config["head_dim"],
    }


def _vocabulary(header: Header) -> int:
    """Tokens of the vocabulary, which must be the rows of the embedding."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    require(
        isinstance(tokens, list),
        f"model.id={header.path} has no tokenizer: tokenizer.ggml.tokens is missing; choose a file of a whole model",
    )
    require(EMBEDDING in header.tensors, f"model.id={header.path} has no tensor {EMBEDDING}; it is no language model")
    rows = header.tensors[EMBEDDING].shape[0]
    assert tokens is not None
    require(
        rows == len(tokens),
        f"model.id={header.path}: the vocabulary (tokenizer.ggml.tokens) has {len(tokens)} tokens and {EMBEDDING} "
        f"{rows} rows; they belong to different models, download the file again",
    )
    return rows


def places(architecture: Architecture, blocks: int) -> dict[str, str]:
    """Name in the file -> name in the model, of every tensor that a model of so many blocks may have."""
    inner = {
        f"blk.{number}.{name}": f"model.layers.{number}.{place}"
        for number in range(blocks)
        for name, place in architecture.block.items()
    }
    return TOP | inner


def check_tensors(header: Header, config: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the file has exactly the tensors of such a model, each of its shape."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, value = (config[f"num_{name}_heads"] * head_dim for name in ("attention", "key_value"))
    shapes = {
        **dict.fromkeys((EMBEDDING, HEAD), (config["vocab_size"], hidden)),
        **dict.fromkeys(("attn_q.weight",), (query, hidden)),
        **dict.fromkeys(("attn_k.weight", "attn_v.weight"), (value, hidden)),
        "attn_output.weight": (hidden, query),
        **dict.fromkeys(("ffn_gate.weight", "ffn_up.weight"), (inner, hidden)),
        "ffn_down.weight": (hidden, inner),
        "attn_q.bias": (query,),
        **dict.fromkeys(("attn_k.bias", "attn_v.bias"), (value,)),
        **dict.fromkeys(_HEAD_NORMS, (head_dim,)),
    }
    wanted = places(architecture_of(header), config["num_hidden_layers"])
    missing = [name for name in wanted if name not in header.tensors and name != HEAD]
    require(
        not missing,
        f"model.id={header.path} lacks {len(missing)} of the {len(wanted)} tensors of {header.architecture}, such as "
        f"{', '.join(missing[:3])}; choose another file",
    )
    scaled = [name for name in wanted if name in header.tensors and header.tensors[name].kind == SCALED]
    scales = {scale_of(name) for name in scaled}
    of_inputs = {scale_of(name, "input_scale") for name in scaled}  # which are not rounded here
    known = {*wanted, FREQUENCIES, *scales, *of_inputs}
    foreign = [name for name in header.tensors if name not in known]
    require(
        not foreign,
        f"model.id={header.path} has {len(foreign)} tensors that {header.architecture} is not known to have, such as "
        f"{', '.join(foreign[:3])}; give the model as safetensors",
    )
    for name in scales & header.tensors.keys():
        beside = header.tensors[name]
        require(
            beside.kind == "F32" and beside.shape == (1,),
            f"model.id={header.path}: tensor {name} is {beside.kind} of the shape {beside.shape}, and the scale of a "
            "tensor in NVFP4 is one number in F32; download the file again",
        )
    for name in wanted:
        if name in header.tensors:
            shape = shapes.get(name) or shapes.get(name.split(".", 2)[-1], (hidden,))
            stored = header.tensors[name].shape
            require(
                stored == shape,
                f"model.id={header.path}: tensor {name} has the shape {stored}, and the metadata ask for {shape}; "
                "download the file again",
            )
