"""model=tiny: a byte-level Qwen2 made on this machine from a seed, warm-started by a supervised run of this harness."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_bench.checks import require, require_count
from qerl_bench.model.base import DTYPES, placed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """Shape, seed and warm start of the tiny model."""

    name: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int
    warm_start_steps: int
    seed: int
    dtype: str
    lr: float

    def __post_init__(self) -> None:
        for key in ("hidden_size", "layers", "heads", "kv_heads", "intermediate_size"):
            require_count(f"model.{key}", getattr(self, key))
        for key in ("warm_start_steps", "seed"):
            require_count(f"model.{key}", getattr(self, key), least=0)
        require(
            self.hidden_size % (2 * self.heads) == 0,
            f"model.hidden_size must be a multiple of 2 * model.heads, got {self.hidden_size} and {self.heads}",
        )
        require(
            self.heads % self.kv_heads == 0,
            f"model.heads must be a multiple of model.kv_heads, got {self.heads} and {self.kv_heads}",
        )
        require(self.dtype in DTYPES, f"model.dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    def warm_start_overrides(self) -> list[str] | None:
        if self.warm_start_steps == 0:
            return None
        shape = ("hidden_size", "layers", "heads", "kv_heads", "intermediate_size", "seed")
        return [
            "experiment=warm_start",
            f"steps={self.warm_start_steps}",
            f"save_every={self.warm_start_steps}",
            f"optim.warmup_steps={min(20, self.warm_start_steps // 2)}",
            *(f"model.{key}={getattr(self, key)}" for key in shape),
        ]

    def config(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": 4096,
        }

    def folder(self) -> Path | None:
        return None

    def load(self, base: Path | None, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        from qerl_bench.model.tokenizer import END_ID, PAD_ID, byte_tokenizer

        dtype = getattr(torch, self.dtype)
        tokenizer = byte_tokenizer()  # AutoTokenizer would make Qwen2's kind of the saved one: NFC, a 263rd token
        if base is not None:
            model = Qwen2ForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
            return placed(model, device, dtype), tokenizer
        config = Qwen2Config(
            **self.config(),
            vocab_size=len(tokenizer),
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=END_ID,
            pad_token_id=PAD_ID,
        )
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            model = Qwen2ForCausalLM(config)
        return placed(placed(model, "cpu", torch.bfloat16), device, dtype), tokenizer
