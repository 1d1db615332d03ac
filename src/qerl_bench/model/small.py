"""model=small/...: a Qwen2 of 2 to 50 million parameters, pretrained on this machine on words and numbers.

Pretraining is a supervised run of this harness on the demonstrations of the task (experiment=pretrain, or another that
`warm_start_experiment` names), cached like the warm start of model=tiny. `seed` decides the initial weights and the
data, so it is the name of a base model: a study of many bases varies it.

`outliers` gives the channels between linear layers sizes of their own: a channel is multiplied by a power of two, and
the weights that read it are divided by it. The unquantized model computes the same, but weights of many sizes now share
a block's scale, so that 4 bits cost accuracy. The weights then err more than released models' (studies/tried.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_bench.model.tiny import TinyModel
from qerl_core.checks import check_fields, count, learning_rate, number, one_of
from qerl_core.options import user_options
from qerl_core.options.files import options_of
from qerl_core.options.names import choice_of
from qerl_core.seeding import derive

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RECIPE = "pretrain"  # how the names of experiments begin that pretrain
MAX_OUTLIERS = 4.0  # three standard deviations are then a factor of 4,096


@dataclass(frozen=True, kw_only=True)
class SmallModel(TinyModel):
    """Sizes, seed and pretraining of a small model; `warm_start_...` are of its pretraining.

    `warm_start_experiment` names the experiment that pretrains. `outliers` is the standard deviation of the channels'
    sizes, in powers of two before rounding.
    """

    warm_start_prompts: int
    warm_start_lr: float
    warm_start_weight_decay: float
    warm_start_experiment: str
    outliers: float

    def __post_init__(self) -> None:
        super().__post_init__()
        recipes = [name for name in options_of(user_options.folders(), "experiment") if name.startswith(RECIPE)]
        check_fields(
            self,
            "model",
            warm_start_prompts=count(),
            warm_start_lr=learning_rate,
            warm_start_weight_decay=number(0),
            warm_start_experiment=one_of(*recipes),
            outliers=number(0, MAX_OUTLIERS),
        )

    def recipe(self) -> str:
        return self.warm_start_experiment

    def warm_start_overrides(self) -> list[str] | None:
        """Pretrained under the name of its own option, in FP32 and before `outliers` whatever that says."""
        words = super().warm_start_overrides()
        if words is None:
            return None
        option = choice_of(user_options.folders(), "model", self.name)
        named = [] if option is None else [f"model={option}", "model.dtype=float32", "model.outliers=0"]
        return [
            *named,
            *words,
            f"rollout.prompts_per_step={self.warm_start_prompts}",
            f"optim.lr={self.warm_start_lr}",
            f"optim.weight_decay={self.warm_start_weight_decay}",
        ]

    def load(self, base: Path | None, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        model, tokenizer = super().load(base, device)
        if self.outliers > 0:
            spread_channels(model, self.outliers, self.seed)
        return model, tokenizer

    def tokenizer(self) -> PreTrainedTokenizerBase:
        from qerl_bench.model.word_tokenizer import word_tokenizer

        return word_tokenizer()


def spread_channels(model: PreTrainedModel, spread: float, seed: int) -> None:
    """Multiply each channel between two layers of a Qwen2 by 2^round(spread * Z), and divide the weights that read it.

    Queries and keys keep theirs: no layer with weights reads what attention makes of them.
    """
    import torch

    decoder: Any = model.model
    shared = decoder.config.num_attention_heads // decoder.config.num_key_value_heads  # heads that read one value
    heads = decoder.config.num_key_value_heads
    with torch.no_grad():
        for layer, block in enumerate(decoder.layers):
            attention, mlp = block.self_attn, block.mlp
            places: tuple[tuple[Any, list[Any]], ...] = (
                (block.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]),
                (attention.v_proj, [attention.o_proj]),
                (block.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]),
                (mlp.up_proj, [mlp.down_proj]),
            )
            for place, (writer, readers) in enumerate(places):
                draw = torch.Generator().manual_seed(derive(seed, "outliers", layer, place))
                exponents = spread * torch.randn(len(writer.weight), generator=draw)
                factors = exponents.round().exp2().to(writer.weight.device, writer.weight.dtype)
                for parameter in (writer.weight, getattr(writer, "bias", None)):
                    if parameter is not None:
                        parameter.mul_(factors.view(-1, *[1] * (parameter.dim() - 1)))  # by row
                if writer is attention.v_proj:
                    factors = factors.view(heads, -1).repeat_interleave(shared, 0).flatten()
                for reader in readers:
                    reader.weight.div_(factors)
