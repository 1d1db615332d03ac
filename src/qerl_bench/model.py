"""Which base model: the built-in tiny one, or a checkpoint from the hub or a local folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qerl_bench.config import require_count
from qerl_bench.errors import BadInput, require

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("float32", "bfloat16", "float16")


class Model(Protocol):
    """A base model: its weights in BF16 (or as stored), computing in `dtype`, and its tokenizer."""

    @property
    def name(self) -> str: ...

    def warm_start_overrides(self) -> list[str] | None:
        """The command-line words of the supervised run that makes this model's base weights; None = needs none."""
        ...

    def config(self) -> dict[str, Any] | None:
        """What its config.json says of its shape; None where that is known only once it is downloaded."""
        ...

    def folder(self) -> Path | None:
        """The checkpoint folder that `load` would read, for packing its layers one by one; None to load it whole."""
        ...

    def load(self, base: Path | None, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Weights and tokenizer on `device`; `base` is the checkpoint folder of the warm start, if there was one."""
        ...


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A byte-level Qwen2 made on this machine from a seed, warm-started by a supervised run of this harness."""

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

        from qerl_bench.tokenizer import END_ID, PAD_ID, byte_tokenizer

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


def placed(model: PreTrainedModel, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """`model` on `device` with its weights in `dtype`. Buffers stay as they are: rotary frequencies need their FP32."""
    import torch

    torch.nn.Module.to(model, device=torch.device(device))  # transformers' wrapper hides the arguments
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A causal language model of the transformers library, by hub id or local folder."""

    name: str
    id: str
    revision: str | None
    dtype: str
    lr: float

    def __post_init__(self) -> None:
        require(self.dtype in DTYPES, f"model.dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    def warm_start_overrides(self) -> list[str] | None:
        return None

    def config(self) -> dict[str, Any] | None:
        path = Path(self.id) / "config.json"
        with self._explained():
            return json.loads(path.read_text()) if path.is_file() else None

    def folder(self) -> Path | None:
        """The local folder, downloaded if need be. None if it holds no safetensors."""
        path = Path(self.id)
        if not path.is_dir():
            path = self._download()
        return path if any(path.glob("*.safetensors")) else None

    def tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        with self._explained():
            return AutoTokenizer.from_pretrained(self.id, revision=self.revision)

    def load(self, base: Path | None, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        import torch
        from transformers import AutoModelForCausalLM

        tokenizer = self.tokenizer()
        with self._explained():
            model = AutoModelForCausalLM.from_pretrained(
                self.id, revision=self.revision, dtype=getattr(torch, self.dtype)
            )
        return placed(model, device, model.dtype), tokenizer

    def _download(self) -> Path:
        from huggingface_hub import snapshot_download

        wanted = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
        with self._explained():
            return Path(snapshot_download(self.id, revision=self.revision, allow_patterns=wanted))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn a failure to find or read the model into words."""
        try:
            yield
        except (OSError, ValueError) as error:  # not there; no tokenizer in it, or an architecture that is not known
            raise BadInput(
                f"model.id={self.id!r} cannot be loaded: {str(error).splitlines()[0]} Give a hub id that this machine "
                "can reach or a local folder: model.id=/path/to/model"
            ) from error
