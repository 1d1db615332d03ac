"""What a base model is: weights, tokenizer, and what is known of its shape before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

from qerl_core.checks import ConfigError
from qerl_core.process.out_of_memory import shortage
from qerl_core.records import Message
from qerl_core.rundir.disk_errors import failure

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("float32", "bfloat16", "float16")
SMALL_BYTES = 2**27  # of weights; in a smaller model, launching kernels takes longer than running them


class Model(Protocol):
    """A base model: its weights in BF16 (or as stored), the dtype it computes in, and its tokenizer."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def template(self) -> Mapping[str, Any] | None:
        """Keywords for the chat template of its tokenizer; None: the template must not be used."""
        ...

    @property
    def trust_remote_code(self) -> bool:
        """Whether Python code that comes with the weights may be executed."""
        ...

    def check_files(self) -> None:
        """Raise ConfigError for what is missing of a model on this machine, as far as names of files tell."""

    def check(self, messages: tuple[Message, ...]) -> None:
        """Raise ConfigError unless config and tokenizer can be read and `messages`, if any, asked. Reads no weights."""
        ...

    def remote_code(self) -> dict[str, str] | None:
        """SHA-256 of each file of Python code that came with the weights and was allowed to run; None if none may."""
        ...

    def warm_start_overrides(self) -> list[str] | None:
        """The command-line words of the supervised run that makes this model's base weights; None = needs none."""
        ...

    def config(self) -> dict[str, Any] | None:
        """The sizes in its config.json; None if they are known only after a download."""
        ...

    def folder(self) -> Path | None:
        """The checkpoint folder that `load` would read, for packing its layers one by one; None if there is none."""
        ...

    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    def load(self, base: Path | None, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Weights and tokenizer on `device`; `base` is the checkpoint folder of the warm start, if there was one."""
        ...


def source_of(model: Model) -> str:
    """The key that says where `model` comes from, with its value: model.id, or the option of one made here."""
    id = getattr(model, "id", None)
    return f"model={model.name}" if id is None else f"model.id={id}"


def require_writable(name: str, *parts: Any) -> None:
    """Raise ConfigError unless each of `parts`, configs and a tokenizer, can be written as checkpoints have them.

    Some can be read and not written: a run would end at its first checkpoint.
    """
    for part in parts:
        with TemporaryDirectory() as folder:
            try:
                part.save_pretrained(folder)
            except Exception as error:  # whatever a foreign class raises
                if shortage(error) or failure(error):
                    raise
                raise ConfigError(
                    f"{name}: its {type(part).__name__} was read and cannot be written ({error}), which checkpoints "
                    "need. Correct the file that it comes from, or choose another model"
                ) from error


def moved_to(model: PreTrainedModel, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """`model` on `device` with its parameters in `dtype`, but in FP32 those that transformers keeps in it.

    Buffers keep theirs: rotary frequencies need FP32.
    """
    import torch

    from qerl_bench.quant.architecture import kept_in_float32

    torch.nn.Module.to(model, device=torch.device(device))  # transformers' wrapper hides the arguments
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if kept_in_float32(model, name) else dtype)
    return model
