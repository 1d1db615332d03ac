"""A causal language model that transformers can load, from the hub or a local folder: model=hub and its presets.

A GGUF file is made into such a folder first, in the cache (`gguf/convert.py`).
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from qerl_bench.model.base import DTYPES, moved_to, source_of
from qerl_bench.model.gguf.architecture import config_of
from qerl_bench.model.gguf.convert import converted, describe
from qerl_bench.model.gguf.header import read_header, require_file
from qerl_bench.model.gguf.vocabulary import TEMPLATE
from qerl_bench.model.gguf.weights import Dither
from qerl_bench.model.local_folder import REMEDY, check_folder
from qerl_bench.model.token_ids import require_rows
from qerl_bench.quant.architecture import causal_lm_config, read_errors
from qerl_bench.quant.foreign_config import GENERATION, generation_config, generation_config_of
from qerl_bench.quant.weight_files import weight_files
from qerl_bench.task.chat_template import check_template, prompt_ids, render_prompt, template_variables
from qerl_core.checks import Check, check_fields, count, flag, naming, number, one_of, optional, require
from qerl_core.records import RENDERED, Message
from qerl_core.rundir.checksums import digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)
_ID = Check(
    lambda value: isinstance(value, str) and value != "", "a hub id, a folder or a GGUF file: model.id=ORG/NAME"
)
SECOND_COPIES = ["consolidated*.safetensors", "original/*"]  # of the weights, for other programs
TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")  # files that may hold the chat template; the first wins
MAX_DITHER_SCALE = 100.0  # ten cells wide: no code of the file is left
_KEYWORDS = Check(lambda value: value is None or isinstance(value, Mapping), "null or a mapping of keywords")


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """`id` is a hub id, a local folder or a GGUF file, whose weights `dither` moves within their rounding cells.

    `template` has the keywords of the chat template; None: do not use one.
    """

    name: str
    id: str
    revision: str | None
    trust_remote_code: bool
    dtype: str
    lr: float
    template: Mapping[str, Any] | None
    dither: int | None
    dither_scale: float

    def __post_init__(self) -> None:
        check_fields(
            self,
            "model",
            id=_ID,
            trust_remote_code=flag,
            dtype=one_of(*DTYPES),
            template=_KEYWORDS,
            dither=optional(count(0)),
            dither_scale=number(above=0, most=MAX_DITHER_SCALE),
        )
        require(
            self.dither is None or self.gguf is not None,
            f"model.dither={self.dither} draws within the rounding cells of a GGUF file, and model.id={self.id} is "
            "none. Use model.dither=null, or model.id=FILE.gguf",
        )
        require(
            self.dither is not None or self.dither_scale == 1,
            f"model.dither_scale={self.dither_scale} is the size of a draw, and model.dither=null draws none. Set "
            "model.dither to a seed, or leave model.dither_scale out",
        )
        require(
            self.gguf is None or self.revision is None,
            f"model.revision={self.revision} chooses a version on the hub, and model.id={self.id} is a file. Leave "
            "it out",
        )

    @property
    def gguf(self) -> Path | None:
        """The GGUF file that `id` names, if it is one."""
        path = Path(self.id)
        return path if path.suffix.lower() == ".gguf" or path.is_file() else None

    @property
    def dithered(self) -> Dither | None:
        return None if self.dither is None else Dither(self.dither, float(self.dither_scale))

    def converted(self, cache: Path) -> Path:
        """The folder below `cache` that has the weights of the GGUF file, made now if it is not there."""
        assert self.gguf is not None
        return converted(self.gguf, self.dithered, self.dtype, cache)

    def at(self, folder: Path) -> HubModel:
        """This model as it lies in `folder`, which its GGUF file was converted to."""
        return replace(self, id=str(folder), dither=None, dither_scale=1.0)

    def warm_start_overrides(self) -> list[str] | None:
        return None

    def config(self) -> dict[str, Any] | None:
        if self.gguf is not None:
            return config_of(read_header(self.gguf)) if self.gguf.is_file() else None
        path = Path(self.id) / "config.json"
        if not path.is_file():
            return None
        with read_errors(self.id, "config.json"):
            content = json.loads(path.read_text())
            return content.get("text_config", content)

    def check_files(self) -> None:
        if self.gguf is None:
            check_folder(self.id)
        else:
            require_file(self.gguf)

    def check(self, messages: tuple[Message, ...]) -> None:
        prompt = json.dumps([messages, None if self.template is None else dict(self.template)])
        with naming(source_of(self)):
            if self.gguf is None:
                place = next((name for name in TEMPLATES if (Path(self.id) / name).is_file()), "its chat template")
                found = _check(self.id, self.revision, self.trust_remote_code, prompt, f"{source_of(self)} ({place})")
            else:
                found = _check_gguf(self.gguf, self.dithered, prompt)
        chosen = f"computed in {self.dtype}, learning rate {self.lr:g}, template {self.template}"
        log.info("model.id=%s: %s; used as %s: %s", self.id, found, self.name, chosen)

    def remote_code(self) -> dict[str, str] | None:
        if not self.trust_remote_code:
            return None
        folder = self._path()
        return {file.name: digest(file) for file in sorted(folder.glob("*.py"))}

    def folder(self) -> Path | None:
        """The local folder, after a download if `id` is none. None if it has no safetensors."""
        path = self._path()
        return path if weight_files(path) else None

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return _tokenizer(self.id, self.revision, self.trust_remote_code)

    def load(self, base: Path | None, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """For a checkpoint without safetensors. Raises ConfigError, too, if it lacks a tensor or one is not finite."""
        import torch
        from transformers import AutoModelForCausalLM

        from qerl_bench.quant.checkpoint import require_finite

        config = causal_lm_config(self.id, self.revision, self.trust_remote_code)
        tokenizer = self.tokenizer()
        with read_errors(self.id, "the weights"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.id,
                config=config,
                revision=self.revision,
                trust_remote_code=self.trust_remote_code,
                dtype=getattr(torch, self.dtype),
                output_loading_info=True,
            )
        model, report = loaded
        missing = sorted(report["missing_keys"])  # filled with random numbers
        require(
            not missing,
            f"model.id={self.id} lacks {len(missing)} tensors of this {type(model).__name__}, such as "
            f"{', '.join(missing[:3])}; download or write the checkpoint again",
        )
        for name, parameter in model.named_parameters():
            require_finite(self._path(), name, parameter.detach())
        if (ends := generation_config(self._path())) is not None:
            model.generation_config = ends
        return moved_to(model, device, model.dtype), tokenizer

    def _path(self) -> Path:
        path = Path(self.id)
        return path if path.is_dir() else self._download()

    def _download(self) -> Path:
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
        patterns += ["*.py"] if self.trust_remote_code else []
        with read_errors(self.id, "the files"):
            return Path(
                snapshot_download(
                    self.id, revision=self.revision, allow_patterns=patterns, ignore_patterns=SECOND_COPIES
                )
            )


def _tokenizer(id: str, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    with read_errors(id, "the tokenizer", REMEDY):
        return AutoTokenizer.from_pretrained(id, revision=revision, trust_remote_code=trust_remote_code)


@lru_cache
def _check(id: str, revision: str | None, trust_remote_code: bool, prompt: str, place: str) -> str:
    """`HubModel.check`, once per process: `prompt` is the JSON of messages and template. Describes the model.

    `place` says where its chat template is.
    """
    from transformers.utils.hub import cached_file

    config = causal_lm_config(id, revision, trust_remote_code)
    if file := cached_file(id, GENERATION, revision=revision, _raise_exceptions_for_missing_entries=False):
        generation_config_of(Path(file))
    tokenizer = _tokenizer(id, revision, trust_remote_code)
    messages, template = json.loads(prompt)
    asked_by = "without a chat template"
    with naming(place):
        if messages:
            check_template(tokenizer, tuple(messages), template)
        if messages and messages[0]["role"] == RENDERED:
            asked_by = "asked in plain text"
        elif template is not None and tokenizer.chat_template:
            reads = ", ".join(sorted(template_variables(tokenizer)))
            asked_by = f"whose chat template reads: {reads or 'no keywords'}"
    if messages:
        ids = prompt_ids(tokenizer, [tuple(messages)], [render_prompt(tokenizer, tuple(messages), template)])
        require_rows(tokenizer, ids, getattr(config, "vocab_size", sys.maxsize), "the prompt")
    stored = f", stored in {str(config.dtype).removeprefix('torch.')}" if config.dtype else ""
    return f"a {config.model_type} model{stored}, {asked_by}"


@lru_cache
def _check_gguf(file: Path, dither: Dither | None, prompt: str) -> str:
    """`_check` of a GGUF file, of which nothing but the header is read."""
    with TemporaryDirectory() as folder:
        describe(file, dither, Path(folder))
        return f"a GGUF file, {_check(folder, None, False, prompt, f'model.id={file} ({TEMPLATE})')}"
