"""engine=vllm: sampling with an unmodified vLLM.

Left out: training without an adapter, which would mean writing every weight again in each step; and sleep level 2,
which would mean reading them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qerl_bench.engine.base import RolloutEngine
from qerl_bench.engine.vllm.install import loads_packed, require_device, require_supported
from qerl_bench.engine.vllm.options import RANKS, VLLMOptions
from qerl_core.checks import require

if TYPE_CHECKING:
    from qerl_bench.model.policy import Policy
    from qerl_bench.quant.base import WeightFormat

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SHAPE = {"max_position_embeddings", "hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"}


@dataclass(frozen=True, kw_only=True)
class VLLM(VLLMOptions):
    """Sample with vLLM."""

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
            self.max_sequence_length(shape, ITEM_BYTES[dtype])

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
