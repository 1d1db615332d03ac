"""The widths of a dense decoder, and the weights and bytes that follow from them. No weights are read.

Left out: mixtures of experts, and layers without full attention, whose time and memory no committed table covers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from qerl_bench.model.base import Model
from qerl_bench.model.gguf.architecture import HEAD
from qerl_bench.model.gguf.header import read_header
from qerl_bench.model.hub import HubModel
from qerl_bench.quant.architecture import causal_lm_config
from qerl_core.checks import ConfigError

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
OWN_VOCABULARY = 262  # of the byte-level tokenizer; models made here with it or a smaller one share head and embedding


@dataclass(frozen=True)
class Sizes:
    """Widths of a decoder: of the residual stream, the MLP, all queries, and keys or values."""

    layers: int
    hidden: int
    inner: int
    query: int
    keys: int
    vocabulary: int
    tied: bool  # embedding and head are one matrix

    @property
    def block_weights(self) -> int:
        """Weights of all matrices in the transformer blocks, which a format packs."""
        return self.layers * (self.hidden * 2 * (self.query + self.keys) + 3 * self.hidden * self.inner)

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def embedding_weights(self) -> int:
        """Of embedding and head, which stay in 16 bits."""
        return self.head_weights * (1 if self.tied else 2)

    def adapter_weights(self, rank: int, targets: str | Sequence[str] = "all") -> int:
        """Of a LoRA adapter on the linear layers of the blocks, or on those that `targets` names."""
        widths = {"q_proj": self.query, "o_proj": self.query, "k_proj": self.keys, "v_proj": self.keys}
        widths |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.inner)
        named = widths.values() if targets == "all" else [widths[name] for name in targets if name in widths]
        return self.layers * rank * sum(self.hidden + width for width in named)

    def key_value_bytes(self, width: int) -> int:
        """Of keys and values of one token, in numbers of `width` bytes."""
        return 2 * self.layers * self.keys * width


def sizes_of(model: Model) -> Sizes | str:
    """The sizes of `model`, or why they are not known here."""
    try:
        config = full_config(model)
    except ConfigError as error:
        return f"the sizes of model={model.name} are not known here: {error}"
    if experts := [key for key in EXPERTS if config.get(key)]:
        return f"model={model.name} is a mixture of experts ({experts[0]}={config[experts[0]]})"
    if {*(config.get("layer_types") or ())} - {"full_attention", "sliding_attention"}:
        return f"model={model.name} has layers without full attention"
    try:
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return Sizes(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            inner=config["intermediate_size"],
            query=heads * head_dim,
            keys=(config.get("num_key_value_heads") or heads) * head_dim,
            vocabulary=config["vocab_size"],
            tied=bool(config["tie_word_embeddings"]),
        )
    except (KeyError, TypeError) as error:
        return f"the config of model={model.name} does not say {error}"


def full_config(model: Model) -> Mapping[str, Any]:
    """config.json of `model`, with what its own kind leaves out. Raises ConfigError if it cannot be read."""
    config = dict(model.config() or {})
    if isinstance(model, HubModel):
        if model.gguf is not None:
            return config | {"tie_word_embeddings": HEAD not in read_header(model.gguf).tensors}
        found = _of_hub(model.id, model.revision, model.trust_remote_code)
        if isinstance(found, ConfigError):
            raise found
        return found
    own: dict[str, Any] = {
        "vocab_size": getattr(model, "vocabulary", OWN_VOCABULARY),
        "tie_word_embeddings": getattr(model, "tied", True),
    }
    return own | config


@cache
def _of_hub(name: str, revision: str | None, trust_remote_code: bool) -> Mapping[str, Any] | ConfigError:
    """The config, or why it cannot be read: a hub that does not answer is asked once, not for each point of a sweep."""
    try:
        found: Any = causal_lm_config(name, revision, trust_remote_code)
    except ConfigError as error:
        return error
    return getattr(found, "text_config", found).to_dict()
