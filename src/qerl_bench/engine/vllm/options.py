"""The options of engine=vllm and the limits that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from qerl_bench.quant.base import NOT_ROUNDED
from qerl_core.checks import at_most, check_fields, count, flag, one_of, optional, positive, require

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM allows for max_lora_rank
# What vLLM calls the caches that have a scale for each token and head. Its `fp8` and `nvfp4` have one scale for all, 1
# unless the checkpoint brings another.
KV_CACHE = {NOT_ROUNDED: "auto", "fp8": "fp8_per_token_head", "int8": "int8_per_token_head"}


@dataclass(frozen=True, kw_only=True)
class VLLMOptions:
    """conf/engine/vllm.yaml explains the fields."""

    name: str
    isolation: str
    dequantize: bool
    max_num_seqs: int
    max_model_len: int | None
    kv_cache_gib: float
    enforce_eager: bool
    sleep_level: int
    tensor_parallel_size: int
    score_batch_size: int

    kv_formats: ClassVar = tuple(KV_CACHE)

    def __post_init__(self) -> None:
        check_fields(
            self,
            "engine",
            isolation=one_of("child", "same"),
            dequantize=flag,
            max_num_seqs=count(),
            max_model_len=optional(count()),
            kv_cache_gib=positive,
            enforce_eager=flag,
            sleep_level=at_most(1, count(0)),
            tensor_parallel_size=count(),
            score_batch_size=count(),
        )
        require(
            self.isolation == "child" or self.tensor_parallel_size == 1,
            "engine.isolation=same runs one process, and engine.tensor_parallel_size="
            f"{self.tensor_parallel_size} needs several; use engine.isolation=child",
        )

    def max_sequence_length(self, shape: Mapping[str, Any], item_bytes: int) -> int:
        """The longest sequence in tokens, for a model whose config.json is `shape`.

        Raises ConfigError unless each device's KV cache has room for one such sequence.
        """
        longest = min(filter(None, (self.max_model_len, shape["max_position_embeddings"])))
        head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
        heads = max(1, shape["num_key_value_heads"] // self.tensor_parallel_size)
        per_token = 2 * shape["num_hidden_layers"] * heads * head * item_bytes  # keys and values
        room = int(self.kv_cache_gib * 2**30 / per_token)
        require(
            room >= longest,
            f"engine.kv_cache_gib={self.kv_cache_gib} holds {room} tokens, less than one sequence of {longest}; make "
            "it larger, or engine.max_model_len smaller",
        )
        return longest
