"""A causal language model that transformers can load, from the hub or a local folder: conf/model/qwen2.5-*.yaml."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_bench.checks import ConfigError, check_fields, one_of
from qerl_bench.model.base import DTYPES, placed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """`id` is a hub id or a local folder."""

    name: str
    id: str
    revision: str | None
    dtype: str
    lr: float

    def __post_init__(self) -> None:
        check_fields(self, "model", dtype=one_of(*DTYPES))

    def warm_start_overrides(self) -> list[str] | None:
        return None

    def config(self) -> dict[str, Any] | None:
        path = Path(self.id) / "config.json"
        with self._errors_explained():
            return json.loads(path.read_text()) if path.is_file() else None

    def folder(self) -> Path | None:
        """The local folder, after a download if `id` is none. None if it has no safetensors."""
        path = Path(self.id)
        if not path.is_dir():
            path = self._download()
        return path if any(path.glob("*.safetensors")) else None

    def tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        with self._errors_explained():
            return AutoTokenizer.from_pretrained(self.id, revision=self.revision)

    def load(self, base: Path | None, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        import torch
        from transformers import AutoModelForCausalLM

        tokenizer = self.tokenizer()
        with self._errors_explained():
            model = AutoModelForCausalLM.from_pretrained(
                self.id, revision=self.revision, dtype=getattr(torch, self.dtype)
            )
        return placed(model, device, model.dtype), tokenizer

    def _download(self) -> Path:
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
        with self._errors_explained():
            return Path(snapshot_download(self.id, revision=self.revision, allow_patterns=patterns))

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        """Turn a failure to find or read the model into a ConfigError."""
        try:
            yield
        except (OSError, ValueError) as error:  # no such model; no tokenizer in it; unknown architecture
            raise ConfigError(
                f"model.id={self.id!r} cannot be loaded: {str(error).splitlines()[0]} Give a hub id that this machine "
                "can reach or a local folder: model.id=/path/to/model"
            ) from error
