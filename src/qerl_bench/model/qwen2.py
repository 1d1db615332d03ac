"""What the models made on this machine share: a Qwen2 of given sizes and the byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from qerl_bench.model.base import DTYPES
from qerl_core.checks import check_fields, count, one_of, require
from qerl_core.records import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen2Config


class MadeHere:
    """A model that comes from no checkpoint, with the byte-level tokenizer."""

    template: ClassVar[Mapping[str, Any]] = {}  # its chat template reads no keywords
    trust_remote_code: ClassVar[bool] = False

    def check_files(self) -> None:
        """It needs none."""

    def check(self, messages: tuple[Message, ...]) -> None:
        """It is made here, with the tokenizer, and can be asked anything."""

    def remote_code(self) -> None:
        return None

    def folder(self) -> Path | None:
        return None

    def tokenizer(self) -> PreTrainedTokenizerBase:
        from qerl_bench.model.byte_tokenizer import byte_tokenizer

        return byte_tokenizer()


@dataclass(frozen=True, kw_only=True)
class Qwen2Spec(MadeHere):
    """The sizes. A subclass adds at least `seed`, `dtype` and `lr`."""

    name: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int

    def __post_init__(self) -> None:
        sizes = dict.fromkeys(("hidden_size", "layers", "heads", "kv_heads", "intermediate_size"), count())
        check_fields(self, "model", **sizes, seed=count(0), dtype=one_of(*DTYPES))
        require(
            self.hidden_size % (2 * self.heads) == 0,
            f"model.hidden_size must be a multiple of 2 * model.heads, got {self.hidden_size} and {self.heads}",
        )
        require(
            self.heads % self.kv_heads == 0,
            f"model.heads must be a multiple of model.kv_heads, got {self.heads} and {self.kv_heads}",
        )

    def config(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate_size,
        }

    def qwen2_config(self, **more: Any) -> Qwen2Config:
        from transformers import Qwen2Config

        own = self.tokenizer()
        ends = {"bos_token_id": None, "eos_token_id": own.eos_token_id, "pad_token_id": own.pad_token_id}
        return Qwen2Config(**self.config(), **more, **ends)
