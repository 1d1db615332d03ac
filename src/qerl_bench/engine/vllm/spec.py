"""engine=vllm: sampling with an unmodified vLLM.

Left out: training without an adapter, which would mean writing every weight again in each step; and sleep level 2,
which would mean reading them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qerl_bench.checks import check_fields, count, flag, one_of, optional, positive, require
from qerl_bench.engine.base import RolloutEngine
from qerl_bench.engine.vllm.install import loads_packed, require_device, require_supported

if TYPE_CHECKING:
    from qerl_bench.model.policy import Policy
    from qerl_bench.quant.base import WeightFormat

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SHAPE = {"max_position_embeddings", "hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"}
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM allows for max_lora_rank


@dataclass(frozen=True, kw_only=True)
class VLLM:
    """Sample with vLLM; conf/engine/vllm.yaml explains the fields."""

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
            sleep_level=count(0, 1),
            tensor_parallel_size=count(),
            score_batch_size=count(),
        )
        require(
            self.isolation == "child" or self.tensor_parallel_size == 1,
            "engine.isolation=same runs one process, and engine.tensor_parallel_size="
            f"{self.tensor_parallel_size} needs several; use engine.isolation=child",
        )

    def check_with(self, shape: Mapping[str, Any], dtype: str, lora_rank: int, longest_completion: int) -> None:
        require(
            1 <= lora_rank <= RANKS[-1],
            f"engine=vllm needs an adapter of rank 1 to {RANKS[-1]}, got lora.rank={lora_rank}; use lora=default with "
            "a rank in that range, or engine=hf",
        )
        require(
            self.max_model_len is None or longest_completion < self.max_model_len,
            f"engine.max_model_len={self.max_model_len} leaves no room for a prompt: completions may have "
            f"{longest_completion} tokens. Make it larger, or task.max_completion_tokens and eval.max_tokens smaller",
        )
        if shape.keys() >= SHAPE:
            require_kv_cache(self, shape, ITEM_BYTES[dtype])

    def check(self, device: str, quant: WeightFormat) -> None:
        vllm_device = require_supported()
        if device != "auto":
            require_device(device)
        loads_packed(quant, self.dequantize, vllm_device)

    def build(self, policy: Policy) -> RolloutEngine:
        from qerl_bench.engine.vllm.checkpoint import BaseCheckpoint
        from qerl_bench.engine.vllm.engine import VLLMEngine

        device = policy.device.type
        program = require_device(device)
        return VLLMEngine(self, policy, BaseCheckpoint.from_model(policy.model, self.dequantize, device), program)


def require_kv_cache(spec: VLLM, shape: Mapping[str, Any], item_bytes: int) -> int:
    """The longest sequence in tokens of a model with config.json `shape`.

    Raises ConfigError unless each device's KV cache has room for one such sequence.
    """
    longest = min(filter(None, (spec.max_model_len, shape["max_position_embeddings"])))
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    heads = max(1, shape["num_key_value_heads"] // spec.tensor_parallel_size)
    per_token = 2 * shape["num_hidden_layers"] * heads * head * item_bytes  # keys and values
    room = int(spec.kv_cache_gib * 2**30 / per_token)
    require(
        room >= longest,
        f"engine.kv_cache_gib={spec.kv_cache_gib} holds {room} tokens, less than one sequence of {longest}; make it "
        "larger, or engine.max_model_len smaller",
    )
    return longest
