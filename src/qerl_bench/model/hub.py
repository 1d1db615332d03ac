"""A causal language model of the transformers library, by hub id or local folder; every conf/model/qwen2.5-*.yaml."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_bench.checks import ConfigError, require
from qerl_bench.model.base import DTYPES, placed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
            raise ConfigError(
                f"model.id={self.id!r} cannot be loaded: {str(error).splitlines()[0]} Give a hub id that this machine "
                "can reach or a local folder: model.id=/path/to/model"
            ) from error
