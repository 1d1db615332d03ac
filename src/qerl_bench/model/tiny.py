"""model=tiny: a byte-level Qwen2 made on this machine from a seed, warm-started by a supervised run of this harness."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_bench.model.base import moved_to
from qerl_bench.model.qwen2 import Qwen2Spec
from qerl_core.checks import check_fields, count, positive

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class TinyModel(Qwen2Spec):
    """Sizes, seed and warm start of the tiny model."""

    warm_start_steps: int
    seed: int
    dtype: str
    lr: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "model", warm_start_steps=count(0))

    def recipe(self) -> str:
        """The experiment that makes the warm start."""
        return "warm_start"

    def warm_start_overrides(self) -> list[str] | None:
        if self.warm_start_steps == 0:
            return None
        shape = ("hidden_size", "layers", "heads", "kv_heads", "intermediate_size", "seed")
        return [
            f"experiment={self.recipe()}",
            f"steps={self.warm_start_steps}",
            *(f"model.{key}={getattr(self, key)}" for key in shape),
        ]

    def config(self) -> dict[str, Any]:
        return super().config() | {"max_position_embeddings": 4096}

    def load(self, base: Path | None, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        import torch
        from transformers import Qwen2ForCausalLM

        dtype = getattr(torch, self.dtype)
        tokenizer = self.tokenizer()  # AutoTokenizer would turn the saved one into Qwen2's: NFC, and a 263rd token
        if base is not None:
            model = Qwen2ForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
            return moved_to(model, device, dtype), tokenizer
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            config = self.qwen2_config(vocab_size=len(tokenizer), tie_word_embeddings=True)
            config.initializer_range = self.initial_std()
            model = Qwen2ForCausalLM(config)
        return moved_to(moved_to(model, "cpu", torch.bfloat16), device, dtype), tokenizer

    def initial_std(self) -> float:
        """The standard deviation of the initial weights."""
        return 0.02


@dataclass(frozen=True, kw_only=True)
class TinyUntrained(TinyModel):
    """The tiny model without its warm start, with weights of standard deviation `init_std`.

    From the 0.02 at which pretraining begins no adapter could move the odds of a token by much: the head is as small.
    """

    init_std: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "model", init_std=positive)

    def initial_std(self) -> float:
        return self.init_std
