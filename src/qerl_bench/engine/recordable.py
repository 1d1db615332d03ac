"""Which models engine=hf can decode with a recorded step (hf_graph.py), and how their blocks are built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qerl_bench.model.cut_tensors import REASON as SHARDED
from qerl_bench.model.keys_values import REASON as KV_ROUNDED
from qerl_bench.model.lm_head import decoder_of
from qerl_bench.model.merging import REASON as MERGED
from qerl_bench.model.policy import Policy
from qerl_bench.quant.linear import PackedLinear


@dataclass(frozen=True)
class BlockNorms:
    """The norms of a block by name: before and after attention and MLP. Norms of queries and keys have one name."""

    before_attention: str
    after_attention: str | None
    before_mlp: str
    after_mlp: str | None
    unit_offset: bool  # they multiply by 1 + weight


LLAMA = BlockNorms("input_layernorm", None, "post_attention_layernorm", None, unit_offset=False)
GEMMA = BlockNorms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    unit_offset=True,
)
FAMILIES = {  # by the model type of the text decoder
    **dict.fromkeys(("llama", "mistral", "ministral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "seed_oss"), LLAMA),
    "gemma3_text": GEMMA,
}
ACTIVATIONS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}  # in qerl_kernels.decoder_layer


def eager_reason(policy: Policy) -> str | None:
    """Why `policy` must be decoded through transformers (hf_reference.py); None if it can be decoded here."""
    config: Any = decoder_of(policy.model).config
    if not policy.fused:
        return "without fused kernels sampling is the reference"
    if policy.is_sharded:
        return SHARDED
    if policy.merging is not None:
        return MERGED
    if policy.kv.kinds.samples_rounded:
        return KV_ROUNDED
    if config.model_type not in FAMILIES or activation_of(config) not in ACTIVATIONS:
        return f"the captured step is not written for {config.model_type} with {activation_of(config)}"
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        return "the model has layers without full attention or a sliding window"
    if {rope["rope_type"] for rope in ropes_of(config).values()} & {"dynamic", "longrope"}:
        return "the rotary frequencies depend on the length"
    if not all(_can_be_captured(experts, config) for experts in experts_of(decoder_of(policy.model))):
        return "the experts' module makes the host wait for the GPU"
    packed = [layer for layer in policy.model.modules() if isinstance(layer, PackedLinear)]
    if any(layer.kernel_weight is None and not layer.multiplies_fp8 for layer in packed):
        return "a packed layer runs the reference"
    return None


def activation_of(config: Any) -> str | None:
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)


def ropes_of(config: Any) -> dict[str | None, dict[str, Any]]:
    """The parameters of the rotary embedding by type of layer; under None if all layers have the same."""
    parameters = config.rope_parameters
    return {None: parameters} if "rope_type" in parameters else parameters


def experts_of(decoder: Any) -> list[Any]:
    return [layer.mlp.experts for layer in decoder.layers if hasattr(layer.mlp, "experts")]


def _can_be_captured(experts: Any, config: Any) -> bool:
    """Whether a module of experts runs without a word from the GPU to the host. Packed experts say so themselves."""
    if any(parameter.ndim == 3 for parameter in experts.parameters(recurse=False)):
        return config._experts_implementation in ("grouped_mm", "batched_mm")
    return getattr(experts, "can_be_captured", False)
