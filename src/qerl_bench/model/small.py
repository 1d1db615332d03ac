"""model=small/...: a Qwen2 of 2 to 50 million parameters, pretrained on this machine on words and numbers.

Pretraining is a supervised run of this harness on the demonstrations of the task (experiment=pretrain), cached like the
warm start of model=tiny. `seed` decides the initial weights and the data, so it is the name of a base model: a study of
many bases varies it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qerl_bench.model.tiny import TinyModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen2Config


@dataclass(frozen=True, kw_only=True)
class SmallModel(TinyModel):
    """Sizes, seed and pretraining of a small model; `warm_start_steps` are the steps of its pretraining."""

    warm_start_experiment = "pretrain"

    def qwen2_config(self, **more: Any) -> Qwen2Config:
        from transformers import Qwen2Config

        from qerl_bench.model.words import END_ID, PAD_ID

        return Qwen2Config(**self.config(), **more, bos_token_id=None, eos_token_id=END_ID, pad_token_id=PAD_ID)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        from qerl_bench.model.words import word_tokenizer

        return word_tokenizer()
