"""What a quantizer moved between the layers of a base, and an adapter that follows it.

AWQ multiplies the weight of a layer by a factor s for each input, and divides what makes that input by it: the base
computes the same, and an adapter that was trained beside one base does not fit another. Matrix A reads the input, so it
is multiplied by s too; matrix B writes the output, so it is divided by the factors of what reads that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from qerl_bench.quantizer.calibrate import InputGroup


@dataclass
class Rescaling:
    """Factors of each input of a layer (K,) and each output of a norm or layer (N,), by path; 1 where none is named."""

    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.inputs)

    def add(self, groups: Iterable[InputGroup], name: str, block: torch.nn.Module) -> None:
        """Take over what was folded into the block `name`, whose layers `groups` names by their path in it."""
        paths = {id(module): f"{name}.{path}" for path, module in block.named_modules()}
        for group in groups:
            if group.folded is None:
                continue
            self.inputs |= {f"{name}.{layer}": group.folded for layer in group.layers}
            if (producer := group.norm if group.norm is not None else group.previous) is not None:
                self.outputs[paths[id(producer)]] = group.per_output(group.folded)

    def from_other(self, other: Rescaling) -> Rescaling:
        """The factors that lead from the base that `other` rescaled to this one."""
        return Rescaling(_ratio(self.inputs, other.inputs), _ratio(self.outputs, other.outputs))


def _ratio(to: dict[str, torch.Tensor], since: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ones = {path: 0 * factors + 1 for path, factors in (to | since).items()}
    return {path: to.get(path, one) / since.get(path, one) for path, one in ones.items()}
