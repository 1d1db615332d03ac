"""Tiny random checkpoints of many architectures: config, weights, and a byte-level tokenizer with a chat template.

Every feature that real checkpoints of a family have is switched on, so that leaving it out changes numbers:
soft-capping, scaled logits, dropout, windows shorter than the tests' sequences, rotary scaling. Widths are multiples of
64, the largest block of a weight format, and each kind of layer occurs. Weights are drawn so that no part is idle:
norms scale by about 1, matrices keep the size of their input, and logits differ by about a nat and a half.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

VOCABULARY = 320  # more than the tokenizer has, like most published models
PAD, END, BEGIN = "<|pad|>", "<|end|>", "<|begin|>"
PAD_ID, END_ID, BEGIN_ID = 256, 257, 258
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WINDOW = 8  # tokens

# What every config gets, as far as its class knows the key.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "attention_dropout": 0.1,
    "pad_token_id": PAD_ID,
    "bos_token_id": BEGIN_ID,
    "eos_token_id": END_ID,
    "tie_word_embeddings": False,
}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "tie_word_embeddings": True,
}
MLA = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SWITCHED_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
SIGLIP = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
}
GEMMA3 = {**SLIDING, "rope_parameters": TWO_ROPES, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}

# By name: the options of its config. The model type is the name, unless `model_type` says otherwise.
# The command-line words of a small run of a build; model.id=FOLDER and what is tested are to be added.
WORDS = (
    "model=qwen2.5-0.5b-instruct",
    "model.dtype=float32",
    "device=cpu",
    "steps=2",
    "optim.warmup_steps=0",
    "lora.rank=4",
    "eval=none",
)

ARCHITECTURES: dict[str, dict[str, Any]] = {
    # two norms before attention and MLP, like Llama
    "llama": {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    "mistral": {"sliding_window": WINDOW},
    "ministral": SLIDING,
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "qwen2": {"use_sliding_window": True, **SLIDING},
    "qwen3": {"head_dim": 32},
    "smollm3": {"no_rope_layers": [1, 0]},
    "phi3": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "sliding_window": WINDOW},
    "granite": GRANITE,
    "seed_oss": {"residual_dropout": 0.1},
    "hunyuan_v1_dense": {},
    "ernie4_5": {"use_bias": True},
    "helium": {},
    "apertus": {},
    "bitnet": {},
    "arcee": {},
    "exaone4": SLIDING,  # a norm after attention and one after the MLP, none before
    "olmo2": {},  # the same
    "olmo3": SLIDING,  # the same
    "nanochat": {"final_logit_softcapping": 2.0},  # its norms have no scale
    # norms before and after
    "glm4": {},
    "gemma2": {
        **SLIDING,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 2.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": GEMMA3,
    "gemma3": {"text_config": GEMMA3, "vision_config": SIGLIP, "mm_tokens_per_image": 4, "tie_word_embeddings": True},
    "gemma4_text": {
        **SLIDING,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": VOCABULARY,
        "final_logit_softcapping": 2.0,
        "per_layer_config": {1: {"head_dim": 32}},
        "tie_word_embeddings": True,
    },
    # LayerNorm, some with biases; some with one norm per block
    "cohere2": {**SLIDING, "logit_scale": 0.25, "tie_word_embeddings": True},
    "starcoder2": {"residual_dropout": 0.1, "embedding_dropout": 0.1, "sliding_window": WINDOW},
    "stablelm": {"hidden_dropout": 0.1, "use_qkv_bias": True},
    "nemotron": {},
    "phi": {"resid_pdrop": 0.1, "embd_pdrop": 0.1},
    # convolutions, state spaces and linear attention beside attention
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 64,
        **ROUTED,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "lm_head_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "key_multiplier": 0.5,
        "attention_out_multiplier": 0.5,
        "mlp_multipliers": [0.5, 0.5],
        "ssm_multipliers": [0.5, 0.5, 0.5, 0.5, 0.5],
    },
    "granitemoehybrid": {
        **GRANITE,
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "qwen3_5_text": DELTA_NET,
    "qwen3_next": {**DELTA_NET, **SWITCHED_EXPERTS, "num_experts": 4},
    # experts
    "qwen3_5_moe_text": {**DELTA_NET, **SWITCHED_EXPERTS, "num_experts": 4},
    "qwen3_moe": {
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "num_local_experts": 4,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {**MLA, **ROUTED, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "glm4_moe": {**ROUTED, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**MLA, **ROUTED, "mlp_layer_types": ["dense", "sparse"]},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        "intermediate_size_mlp": 128,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0],
        "attention_chunk_size": WINDOW,
    },
    "gpt2": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 1024,
        "tie_word_embeddings": True,
    },
}


def known() -> list[str]:
    """The names in ARCHITECTURES whose model type the installed transformers has."""
    from transformers import CONFIG_MAPPING

    return [name for name, options in ARCHITECTURES.items() if options.get("model_type", name) in CONFIG_MAPPING]


def build(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint of architecture `name`, drawn from `seed`, to `folder` in BF16, and return `folder`."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(name))
        draw_weights(model, torch.Generator().manual_seed(seed))
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def config_of(name: str) -> Any:
    from transformers import AutoConfig

    options: dict[str, Any] = {"model_type": name} | ARCHITECTURES[name]
    model_type = options.pop("model_type")
    if "text_config" in options:
        options["text_config"] = _with_common(f"{model_type}_text", options["text_config"])
        options |= {key: COMMON[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
        return AutoConfig.for_model(model_type, **options)
    return AutoConfig.for_model(model_type, **_with_common(model_type, options))


def _with_common(model_type: str, options: dict[str, Any]) -> dict[str, Any]:
    """`options` and those of COMMON that the config class knows. An option it does not know is an error."""
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[model_type]().to_dict()
    unknown = [key for key in options if key not in default]
    assert not unknown, f"{model_type} has no {unknown}"
    return {key: value for key, value in COMMON.items() if key in default} | options


def draw_weights(model: PreTrainedModel, generator: torch.Generator) -> None:
    """New values for norms, biases, matrices and embeddings. Other vectors, such as decay rates, keep their own."""
    import torch

    def normal(parameter: torch.Tensor, std: float, mean: float = 0.0) -> None:
        parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))

    with torch.no_grad():
        for path, module in model.named_modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                if isinstance(module, torch.nn.Embedding):
                    normal(parameter, 0.2)
                elif "norm" in type(module).__name__.lower() and leaf == "weight":
                    normal(parameter, 0.1, mean=float(parameter.float().mean().round()))  # 1, or 0 for 1 + w
                elif leaf.endswith("bias"):
                    normal(parameter, 0.1)
                elif parameter.ndim >= 2:
                    is_head = path == "lm_head"
                    normal(parameter, (1.5 if is_head else 1.0) * parameter.shape[-1] ** -0.5)


def write_tokenizer(folder: Path) -> None:
    """256 bytes, padding, end, begin and the three roles of the chat template: ids 0 to 261."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, END, BEGIN, "<|system|>", "<|user|>", "<|assistant|>"])
    assert [tokenizer.token_to_id(token) for token in (PAD, END, BEGIN)] == [PAD_ID, END_ID, BEGIN_ID]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        bos_token=BEGIN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
