"""model=shape/...: random weights in the true shape of a model, for the speed and memory of its steps.

Made from a seed where they will lie, one transformer block after the other, each packed before the next is made: no
download, no checkpoint, and never the whole model in 16 bits. It knows nothing, and no text that it writes means
anything. Left out: the tokenizer of the model; tasks of exact lengths (task=shape) need none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_bench.checks import require, require_count
from qerl_bench.model.base import DTYPES
from qerl_bench.seeding import derive

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

COUNTS = ("hidden_size", "layers", "heads", "kv_heads", "intermediate_size", "vocabulary", "context")


@dataclass(frozen=True, kw_only=True)
class ShapeModel:
    """A Qwen2 of the given sizes. Weights are BF16, as in a checkpoint, and computed with in `dtype`."""

    name: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int
    vocabulary: int
    context: int
    tied: bool
    seed: int
    dtype: str
    lr: float

    def __post_init__(self) -> None:
        for key in COUNTS:
            require_count(f"model.{key}", getattr(self, key))
        require_count("model.seed", self.seed, least=0)
        require(
            self.hidden_size % (2 * self.heads) == 0,
            f"model.hidden_size must be a multiple of 2 * model.heads, got {self.hidden_size} and {self.heads}",
        )
        require(
            self.heads % self.kv_heads == 0,
            f"model.heads must be a multiple of model.kv_heads, got {self.heads} and {self.kv_heads}",
        )
        require(
            self.vocabulary >= 262,
            f"model.vocabulary must be at least 262, the tokens of the built-in tokenizer, got {self.vocabulary}",
        )
        require(isinstance(self.tied, bool), f"model.tied must be true or false, got {self.tied!r}")
        require(self.dtype in DTYPES, f"model.dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    def warm_start_overrides(self) -> list[str] | None:
        """It stays random."""
        return None

    def config(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.context,
        }

    def folder(self) -> Path | None:
        return None

    def streamed(self, device: str) -> tuple[Any, RandomWeights, PreTrainedTokenizerBase]:
        """The model without weights, who makes them on `device` when they are asked for, and a tokenizer of bytes."""
        import torch
        from accelerate import init_empty_weights
        from transformers import AutoModelForCausalLM, Qwen2Config

        from qerl_bench.model.tokenizer import END_ID, PAD_ID, byte_tokenizer

        config = Qwen2Config(
            **self.config(),
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            bos_token_id=None,
            eos_token_id=END_ID,
            pad_token_id=PAD_ID,
        )
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, self.dtype))
        model.tie_weights()
        return model.eval(), RandomWeights(self.seed, device), byte_tokenizer()

    def load(self, base: Path | None, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        model, weights, tokenizer = self.streamed(device)
        weights.fill(model, [name for name, _ in model.named_parameters()])
        return model.to(device), tokenizer


class RandomWeights:
    """The values of a model's parameters, each by its name and the seed: it does not matter in which order.

    Rows of a matrix have length 1 on average: what goes in with a mean square of 1 comes out so, in a model of any
    width, and so do logits. Norm scales are 1 and biases 0. A GPU draws other numbers than a CPU.
    """

    def __init__(self, seed: int, device: str) -> None:
        self.seed, self.device = seed, device

    def fill(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        import torch

        for name in names:
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            empty = module.get_parameter(leaf)
            if empty.is_meta:
                values = self._values(name, empty.shape).to(empty.dtype)
                setattr(module, leaf, torch.nn.Parameter(values, requires_grad=empty.requires_grad))
        model.tie_weights()  # type: ignore[operator]

    def _values(self, name: str, shape: torch.Size) -> torch.Tensor:
        import torch

        values = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        if len(shape) == 1:
            return values.fill_(0.0 if name.endswith("bias") else 1.0)
        generator = torch.Generator(self.device).manual_seed(derive(self.seed, name))
        return values.normal_(0.0, shape[1] ** -0.5, generator=generator)
