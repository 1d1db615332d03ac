"""model=shape/...: random weights in the shape of a real model, to measure the speed and memory of its steps.

The weights are made from a seed on the device that needs them. Each transformer block is packed before the next one is
made, so there is no download, no checkpoint, and never the whole model in 16 bits. The text it writes is noise. Left
out: the real model's tokenizer; tasks with exact lengths (task=shape) do not need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_bench.checks import check_fields, count, flag
from qerl_bench.model.qwen2 import Qwen2Spec
from qerl_bench.seeding import derive

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class ShapeModel(Qwen2Spec):
    """A Qwen2 of the given sizes. Weights are BF16, as in a checkpoint, and computed with in `dtype`."""

    vocabulary: int
    context: int
    tied: bool
    seed: int
    dtype: str
    lr: float

    def __post_init__(self) -> None:
        super().__post_init__()
        # The built-in tokenizer has 262 tokens.
        check_fields(self, "model", vocabulary=count(262), context=count(), tied=flag)

    def warm_start_overrides(self) -> list[str] | None:
        """None: the weights stay random."""
        return None

    def config(self) -> dict[str, Any]:
        return super().config() | {"max_position_embeddings": self.context}

    def without_weights(self) -> Any:
        """The model with all parameters on the meta device, for `RandomWeights` to fill."""
        import torch
        from accelerate import init_empty_weights
        from transformers import AutoModelForCausalLM

        config = self.transformers_config(
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, self.dtype))
        model.tie_weights()
        return model.eval()

    def load(self, base: Path | None, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        model = self.without_weights()
        RandomWeights(self.seed, device).fill(model, [name for name, _ in model.named_parameters()])
        return model.to(device), self.tokenizer()


class RandomWeights:
    """Makes a model's parameters. Name and seed decide each of them, so the order of the calls does not matter.

    Rows of a matrix have length 1 on average. Inputs with a mean square of 1 therefore keep it, in a model of any
    width, and so do logits. Norm scales are 1 and biases 0. A GPU draws other numbers than a CPU.
    """

    def __init__(self, seed: int, device: str) -> None:
        self.seed, self.device = seed, device

    def fill(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        """Give the parameters `names` of `model` their values, except those that have some."""
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
