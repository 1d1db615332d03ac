"""model=shape/...: random weights in the shape of a real model, to measure the speed and memory of its steps.

The weights are made from a seed on the device that needs them. Each transformer block is packed before the next one is
made, so there is no download, no checkpoint, and never the whole model in 16 bits. The text it writes is noise. Left
out: the real model's tokenizer; tasks with exact lengths (task=shape) do not need it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_bench.model.base import DTYPES
from qerl_bench.model.qwen2 import MadeHere, Qwen2Spec
from qerl_core.checks import check_fields, count, flag, one_of, require
from qerl_core.seeding import derive

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

LEAST_VOCABULARY = 262  # tokens of the built-in tokenizer


class RandomModel(MadeHere, ABC):
    """A model that transformers builds from a config, with random weights, which are BF16 as in a checkpoint."""

    name: str
    dtype: str
    seed: int

    @abstractmethod
    def transformers_config(self) -> PretrainedConfig: ...

    def warm_start_overrides(self) -> list[str] | None:
        """None: the weights stay random."""
        return None

    def without_weights(self) -> Any:
        """The model with all parameters on the meta device, for `RandomWeights` to fill."""
        import torch
        from accelerate import init_empty_weights
        from transformers import AutoModelForCausalLM

        config = self.transformers_config()
        with init_empty_weights(include_buffers=False), unfilled_memory():
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, self.dtype))
        model.tie_weights()
        return model.eval()

    def load(self, base: Path | None, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        model = self.without_weights()
        RandomWeights(self.seed, device).fill(model, [name for name, _ in model.named_parameters()])
        return model.to(device), self.tokenizer()


@contextmanager
def unfilled_memory() -> Iterator[None]:
    """In this block PyTorch's deterministic mode, that of a CPU, does not fill new memory with NaN: a parameter is made
    there before it goes to the meta device, and filling those of 72B takes a minute."""
    import torch

    deterministic: Any = torch.utils.deterministic
    before = deterministic.fill_uninitialized_memory
    try:
        deterministic.fill_uninitialized_memory = False
        yield
    finally:
        deterministic.fill_uninitialized_memory = before


@dataclass(frozen=True, kw_only=True)
class ShapeModel(RandomModel, Qwen2Spec):
    """A Qwen2 of the given sizes, computed with in `dtype`."""

    vocabulary: int
    context: int
    tied: bool
    seed: int
    dtype: str
    lr: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "model", vocabulary=count(LEAST_VOCABULARY), context=count(), tied=flag)

    def config(self) -> dict[str, Any]:
        return super().config() | {"max_position_embeddings": self.context}

    def transformers_config(self) -> PretrainedConfig:
        return self.qwen2_config(
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )


@dataclass(frozen=True, kw_only=True)
class ArchitectureShape(RandomModel):
    """A model of any `architecture`, which transformers calls model type. `sizes` are fields of its config.

    Fields that are not listed have the defaults of transformers.
    """

    name: str
    architecture: str
    sizes: Mapping[str, Any]
    seed: int
    dtype: str
    lr: float

    def __post_init__(self) -> None:
        check_fields(self, "model", seed=count(0), dtype=one_of(*DTYPES))
        needed = {"vocab_size": LEAST_VOCABULARY, "hidden_size": 1, "num_hidden_layers": 1}
        missing = needed.keys() - self.sizes.keys()
        require(not missing, f"model.sizes must have {', '.join(needed)}; add {', '.join(sorted(missing))}")
        for key, least in needed.items():
            count(least)(f"model.sizes.{key}", self.sizes[key])

    def config(self) -> dict[str, Any]:
        return {"model_type": self.architecture, **self.sizes}

    def transformers_config(self) -> PretrainedConfig:
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        from qerl_bench.model.byte_tokenizer import END_ID, PAD_ID

        require(
            self.architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            "model.architecture must be a model type of a causal LM of transformers, such as qwen3_moe, got "
            f"{self.architecture!r}",
        )
        default: Any = AutoConfig.for_model(self.architecture)
        # Models read head_dim whether their config has it or not.
        known = {*default.to_dict(), *default.attribute_map, "head_dim"}
        unknown = [key for key in self.sizes if key not in known]
        require(
            not unknown,
            f"model.sizes has {', '.join(unknown)}, which {self.architecture} has not in transformers; leave it out",
        )
        ends = {"bos_token_id": None, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
        return AutoConfig.for_model(self.architecture, **self.sizes, **ends)


class RandomWeights:
    """Makes a model's parameters. Name and seed decide each of them, so the order of the calls does not matter.

    Rows of a matrix, that of an expert too, have length 1 on average. Inputs with a mean square of 1 therefore keep it,
    in a model of any width, and so do logits. Norm scales are 1 and biases 0. A GPU draws other numbers than a CPU.
    """

    def __init__(self, seed: int, device: str) -> None:
        self.seed, self.device = seed, device

    def fill(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        """Give the parameters `names` of `model` their values, except those that have some."""
        import torch

        from qerl_bench.quant.experts import is_transposed

        for name in names:
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            empty = module.get_parameter(leaf)
            if empty.is_meta:
                inputs = 1 if empty.ndim == 3 and is_transposed(module) else -1
                values = self._values(name, empty.shape, inputs).to(empty.dtype)
                setattr(module, leaf, torch.nn.Parameter(values, requires_grad=empty.requires_grad))
        model.tie_weights()  # type: ignore[operator]

    def _values(self, name: str, shape: torch.Size, inputs: int) -> torch.Tensor:
        """Values of a parameter whose axis `inputs` is summed over."""
        import torch

        values = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        if len(shape) == 1 or name.endswith("bias"):
            return values.fill_(0.0 if name.endswith("bias") else 1.0)
        generator = torch.Generator(self.device).manual_seed(derive(self.seed, name))
        return values.normal_(0.0, shape[inputs] ** -0.5, generator=generator)
