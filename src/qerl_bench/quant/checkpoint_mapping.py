"""Between the names of a checkpoint and those of the model: transformers' own conversion, one tensor at a time.

transformers merges the linear layers of a checkpoint's experts into one parameter, and renames others. Its loader does
so for a whole model; here the same rules say what each tensor of the model is made of, so that it can be read when its
turn comes, and which rows of an experts parameter belong to which layer of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from qerl_bench.quant.architecture import TEXT_PART


@dataclass
class Source:
    """What one tensor of the model is made of. `keys` lists the checkpoint's names by the pattern that they match."""

    name: str  # the first of the model's tensors that are made of the same ones
    converter: Any = None  # transformers' WeightConverter; None for a tensor that is taken as it is
    keys: dict[str, list[str]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The only name of a tensor that is taken as it is."""
        ((key,),) = self.keys.values()
        return key

    def make(self, name: str, model: Any, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The tensor `name` of the model; `read` returns a tensor of the checkpoint."""
        if self.converter is None:
            return read(self.key)
        converter = deepcopy(self.converter)
        for pattern, keys in self.keys.items():
            for key in keys:
                converter.add_tensor(self.name, key, pattern, read(key))
        made = converter.convert(self.name, model=model, config=model.config)[name]
        return made[0] if isinstance(made, list) else made


def sources_of(model: Any, keys: Iterable[str]) -> dict[str, Source]:
    """What each tensor of `model` is made of, given the names in a checkpoint; and leftovers, under their own names.

    Follows `convert_and_load_state_dict_in_model` of transformers.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model, key_mapping=TEXT_PART)
    state, prefix = model.state_dict(), model.base_model_prefix
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    sources: dict[str, Source] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        converter = None if pattern is None else converter_of[pattern]
        targets = [""] if converter is None else converter.target_patterns
        source = sources.setdefault(name, Source(name, converter))
        source.keys.setdefault(pattern or key, []).append(key)
        sources |= {name.replace(targets[0], other): source for other in targets[1:]}
    return sources


def in_checkpoint(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the model as its checkpoints name and split them."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(tensors))


def rows_in_checkpoint(model: Any, name: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The linear layers that a checkpoint of `model` has for the experts parameter `name`, each with its rows (n,).

    `shape` is (E, N); rows count those of all experts, one after the other. Empty if the checkpoint has no linear layer
    per expert. The rows are found by letting transformers split a parameter that holds their numbers.
    """
    numbers = torch.arange(shape[0] * shape[1]).view(*shape, 1).expand(*shape, 2).contiguous()
    split = in_checkpoint(model, {name: numbers})
    layers = {key.removesuffix(".weight"): rows[:, 0] for key, rows in split.items() if rows.dim() == 2}
    return layers if sum(map(len, layers.values())) == numbers.numel() // 2 else {}
