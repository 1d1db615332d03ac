"""How the ranks of a run share the backward passes of an update, and how their gradients become one.

With parallel.exact each rank takes whole micro-batches of a single rank, and all add up the gradients in its order.
Else each makes micro-batches of its own sequences, and gradients are added up once. They are every n-th in order of
length, or where passes share prompts a piece of the order by prompt, so that all have about as many tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import TypeVar

import torch

from qerl_bench.model.cut_tensors import is_cut, own_part
from qerl_bench.model.policy import Policy
from qerl_bench.parallel import World
from qerl_bench.train.batch import Batch
from qerl_core.checks import TrainingStopped, require

Item = TypeVar("Item")


def rank_rows(batch: Batch, has_gradient: torch.Tensor, world: World, shares_prompts: bool) -> torch.Tensor:
    """Which sequences (B,) of `batch` this rank trains on: its part of `has_gradient` (B,), and of the others."""
    own = torch.zeros_like(has_gradient)
    order = torch.argsort(batch.lengths, descending=True, stable=True)
    for selected in (has_gradient, ~has_gradient):
        if shares_prompts:
            rows, added = batch.by_prompt(selected)
            middles = added.cumsum(0) - added / 2
            own[rows[(middles * world.size / added.sum()).long() == world.rank]] = True
        else:
            own[order[selected[order]][world.rank :: world.size]] = True
    return own


def schedule(micro_batches: Sequence[Item], world: World, exact: bool) -> list[list[tuple[int, Item]]]:
    """The micro-batches that this rank does between two sums of gradients, each with its place among those of all.

    With `exact` the `micro_batches` are those of all ranks, else of this rank. All ranks have equally many turns.
    """
    if world.size == 1 or not exact:
        return [list(zip(count(world.rank, world.size), micro_batches, strict=False))]
    numbered = list(enumerate(micro_batches))
    return [
        numbered[start : start + world.size][world.rank : world.rank + 1]
        for start in range(0, len(micro_batches), world.size)
    ]


class GradientSum:
    """The sum of the gradients of all ranks; for a single rank it is what PyTorch has added up in the parameters.

    Those of weights that are cut FSDP2 adds up in each backward pass.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], world: World, exact: bool) -> None:
        self.parameters = [parameter for parameter in parameters if not is_cut(parameter)]
        self.world, self.exact = world, exact
        self.sums: list[torch.Tensor | None] = [None] * len(self.parameters)

    def add(self) -> None:
        """Take the gradients from the parameters and add those of all ranks, with `exact` rank by rank."""
        if self.world.size == 1:
            return
        gradients = [parameter.grad for parameter in self.parameters]
        own = torch.cat(
            [
                torch.tensor([float(gradient is not None) for gradient in gradients], device=self.parameters[0].device),
                *(
                    (torch.zeros_like(parameter) if gradient is None else gradient).flatten().float()
                    for parameter, gradient in zip(self.parameters, gradients, strict=True)
                ),
            ]
        )
        for parameter in self.parameters:
            parameter.grad = None
        sizes = [parameter.numel() for parameter in self.parameters]
        for part in self.world.gather_tensors(own) if self.exact else [self.world.add(own)]:
            given = part[: len(sizes)].tolist()
            for number, flat in enumerate(part[len(sizes) :].split(sizes)):
                if given[number] > 0:
                    before = self.sums[number]
                    self.sums[number] = flat.clone() if before is None else before + flat

    def write_back(self) -> None:
        """Give the parameters the sums as their gradients. One without a gradient on any rank keeps none."""
        if self.world.size == 1:
            return
        for parameter, total in zip(self.parameters, self.sums, strict=True):
            parameter.grad = None if total is None else total.view_as(parameter).to(parameter.dtype)


def missing_passes(policy: Policy, own: int, world: World) -> int:
    """How many backward passes this rank, which has `own`, lacks for as many as the others make.

    Nothing lacks unless weights are cut and trained: their gradients FSDP2 adds up in each backward pass.
    """
    return max(world.gather(own)) - own if any(map(is_cut, policy.trainable)) else 0


def pass_without_gradient(policy: Policy) -> None:
    """A backward pass that adds zeros."""
    ids, mask = torch.tensor([[0, 0]], device=policy.device), torch.tensor([[False, True]], device=policy.device)
    (policy.token_stats(ids, mask, 1.0).logprobs.sum() * 0).backward()


def norm_of_gradients(parameters: Sequence[torch.nn.Parameter], world: World) -> torch.Tensor:
    """The norm of the gradients of all `parameters` together, FP32, the same on all ranks."""
    cut, rest = ([p.grad for p in parameters if p.grad is not None and is_cut(p) == one] for one in (True, False))
    norm = torch.nn.utils.get_total_norm(rest)
    if not cut:
        return norm
    of_parts = world.add(torch.nn.utils.get_total_norm([own_part(gradient) for gradient in cut]).square())
    return (norm.square() + of_parts).sqrt()


def require_equal_inputs(inputs: Mapping[str, str], world: World) -> None:
    """Raise ConfigError unless all ranks, on whatever machines, have the same `inputs`: contents or digests by name."""
    first, *others = world.gather(dict(inputs))
    for rank, of_rank in enumerate(others, 1):
        other = [name for name in first | of_rank if first.get(name) != of_rank.get(name)]
        require(
            not other,
            f"{', '.join(other)}: process {rank} has another than process 0. Give all machines the same words, files "
            "and version of qerl-bench",
        )


def require_equal_weights(model: torch.nn.Module, world: World) -> None:
    """Raise TrainingStopped unless all ranks have the same parameters and buffers, by the sum of the bytes of each.

    Of a sharded base each has other parts, which are left out.
    """
    if world.size == 1:
        return
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if not name.endswith("inv_freq")]
    whole = [(name, tensor) for name, tensor in model.named_parameters() if not is_cut(tensor)]
    tensors = [*whole, *buffers]  # some rotary frequencies follow the longest sequence so far
    sums = [tensor.detach().contiguous().view(-1).view(torch.uint8).sum(dtype=torch.int64) for _, tensor in tensors]
    of_ranks = world.gather(torch.stack([total.cpu() for total in sums]).tolist())
    for (name, _), values in zip(tensors, zip(*of_ranks, strict=True), strict=True):
        if len({*values}) > 1:
            raise TrainingStopped(
                f"the processes of this run hold different weights, first {name}: a kernel on the way there gives "
                "other numbers each time. Repeat the command (a run continues from its last checkpoint), or use one GPU"
            )
