"""Which files of a folder are its weights: those that transformers reads.

Repositories hold weights a second time under other names (consolidated.safetensors), and adapters beside their base.
"""

from __future__ import annotations

import json
from pathlib import Path

from qerl_core.checks import ConfigError, require

WHOLE = "model.safetensors"
INDEX = f"{WHOLE}.index.json"
FOREIGN = ("consolidated", "adapter_")  # how files begin that are no checkpoint of transformers
REMEDY = "download or write the checkpoint again"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of the checkpoint in `folder`, by name: those of its index, or model.safetensors, or, without
    either, all that may be parts of one. Empty if there is none.

    Raises ConfigError if the index is unreadable, names a file that is not there, or leaves out model.safetensors.
    """
    whole, index = folder / WHOLE, folder / INDEX
    if index.is_file():
        listed = indexed(folder)
        for tensor, name in listed.items():
            require(
                Path(name).name == name and (folder / name).is_file(),
                f"{index} says that the tensor {tensor} is in {name}, which the folder does not have; {REMEDY}",
            )
        require(
            not whole.is_file() or WHOLE in listed.values(),
            f"{folder} has {WHOLE}, and {INDEX} of other files: which of them are the weights? Delete {INDEX}, or "
            f"{WHOLE} if it is the older one",
        )
        return sorted({folder / name for name in listed.values()})
    if whole.is_file():
        return [whole]
    return sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith(FOREIGN))


def left_out(folder: Path) -> list[str]:
    """The names of the other safetensors in `folder`."""
    return sorted(path.name for path in {*folder.glob("*.safetensors")} - {*weight_files(folder)})


def indexed(folder: Path) -> dict[str, str]:
    """The file of each tensor in the index of `folder`; empty without one."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        listed = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError):
        listed = None
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ConfigError(f"{path} is not an index of tensors; {REMEDY}")
    return listed
