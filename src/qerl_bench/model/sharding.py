"""A base of which each rank of a run keeps a part: all ranks gather a block for as long as it computes.

FSDP2 (`torch.distributed.fsdp.fully_shard`) cuts, gathers and frees. Cut are the weights of the blocks' linear layers;
codes and scales of packed ones travel as they are, without a MixedPrecisionPolicy, which would round scales. Each rank
keeps the rest whole: embeddings, head, norms, biases and adapters. Noise writes to norms, and sampling reads the head.

A gather takes all ranks, and they pass through the model unequally often. So each says what it does next, and one
without a pass joins in gathering for the others, as torch.distributed.algorithms.Join does for DDP. Left out: loading
in parts; a rank frees the others' once the checks of the whole base have passed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from qerl_bench.model.cut_tensors import is_cut, own_part
from qerl_bench.model.lm_head import decoder_of
from qerl_bench.model.policy import Policy
from qerl_bench.parallel import Ranks
from qerl_bench.quant.linear import TENSOR_SCALES, PackedLinear
from qerl_bench.quant.packed_share import decoder_blocks
from qerl_bench.quant.packed_weight import store_as_parameters
from qerl_core.checks import TrainingStopped, require

log = logging.getLogger(__name__)
ALL_GATHER, REDUCE_SCATTER = (
    getattr(torch.distributed, name, getattr(torch.distributed, before))
    for name, before in {
        "all_gather_single": "all_gather_into_tensor",
        "reduce_scatter_single": "reduce_scatter_tensor",
    }.items()
)  # before PyTorch 2.13 they have other names
ENDED = (
    "a pass through a sharded base ended in an error, and all processes would have to repeat it. If memory ran out, "
    "use a smaller train.micro_batch_tokens or engine.max_num_seqs, or more processes"
)


class Turn(IntEnum):
    """What a rank does next; the largest that any rank asks for comes first."""

    MEET = 0  # tell each other something
    BACKWARD = 1
    FORWARD = 2


class Passes:
    """The passes of all ranks through `blocks`, in the order in which they run."""

    def __init__(self, world: Ranks, decoder: torch.nn.Module, blocks: Sequence[FSDPModule]) -> None:
        self.world, self.decoder, self.blocks = world, decoder, blocks
        first: Any = blocks[0]
        self.trains_blocks = any(parameter.requires_grad for parameter in first.parameters() if is_cut(parameter))
        self.in_pass = False
        decoder.register_forward_pre_hook(self._before_forward, prepend=True)
        decoder.register_forward_hook(self._after_forward)
        first.register_forward_pre_hook(self._before_first, prepend=True, with_kwargs=True)
        first.register_forward_hook(self._after_first, with_kwargs=True)
        world.before_meeting = lambda value: self.begin(Turn.MEET, value)

    def begin(self, own: Turn, value: object = None) -> None:
        """Return when all ranks are at `own`, after joining in what others do before. `value` is told at a meeting.

        Raises what ended a pass of this rank: the others are in the middle of it, and end when this rank does.
        """
        if self.in_pass:
            if isinstance(value, TrainingStopped):
                raise value
            raise TrainingStopped(f"{ENDED}: {value}" if isinstance(value, Exception) else ENDED)
        while (turn := self.world.largest_of(own)) != own:
            if turn == Turn.BACKWARD and self.trains_blocks:  # of which each rank makes as many, if none fails
                raise value if isinstance(value, Exception) else TrainingStopped(ENDED)
            for block in self.blocks if turn == Turn.FORWARD else reversed(self.blocks):
                block.unshard()
                block.reshard()
        self.in_pass = own != Turn.MEET

    def _before_forward(self, module: object, inputs: object) -> None:
        if module is self.decoder:  # and not the copy of it that `head_of` makes, which runs no block
            self.begin(Turn.FORWARD)

    def _after_forward(self, module: object, inputs: object, output: Any) -> None:
        if module is not self.decoder:
            return
        self.in_pass = False
        if torch.is_grad_enabled() and output[0].requires_grad:
            output[0].register_hook(lambda gradient: self.begin(Turn.BACKWARD))

    def _before_first(self, block: object, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A backward pass needs no other rank once the gradient of what the first block reads is there ..."""
        self._ends_at(inputs[0] if inputs else options["hidden_states"])

    def _after_first(self, block: object, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        """... or, where that has none, at what the block gives: then its weights are there."""
        if not (inputs[0] if inputs else options["hidden_states"]).requires_grad:
            self._ends_at(output[0] if isinstance(output, tuple) else output)

    def _ends_at(self, hidden: torch.Tensor) -> None:
        def end(gradient: torch.Tensor) -> None:
            self.in_pass = False

        if torch.is_grad_enabled() and hidden.requires_grad:
            hidden.register_hook(end)


class _Collective:
    """A collective of FSDP2 that tells of a rank that has ended."""

    def __init__(self, world: Ranks, function: Callable[..., Any]) -> None:
        self.world, self.function = world, function

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any) -> Any:
        with self.world.answer():
            return self.function(output_tensor, input_tensor, **options)


def shard(policy: Policy, where: str, world: Ranks) -> Passes:
    """Cut the blocks of `policy`, whose weights are equal on all ranks, and let ranks pass through it together.

    Raises ConfigError if they have experts, or no linear layers, and TrainingStopped if what is gathered is not, byte
    for byte, what was cut.
    """
    require(
        not policy.experts,
        f"parallel.shard=true cuts linear layers, and {where} has experts. Use parallel.shard=false, or another model",
    )
    model: Any = policy.model
    before = own_bytes(model)
    blocks: Any = decoder_blocks(model)[1]
    device = next(model.parameters()).device
    group: Any = world.group_of(device) or torch.distributed.group.WORLD
    mesh = DeviceMesh.from_group(group, device.type)
    contents = []
    for block in blocks:
        cut = set(cut_parameters(block, trained=policy.adapter is None))
        contents.append(content_of(block))
        fully_shard(block, mesh=mesh, ignored_params={one for one in block.parameters() if one not in cut})
        block.set_custom_all_gather(_Collective(world, ALL_GATHER))
        block.set_custom_reduce_scatter(_Collective(world, REDUCE_SCATTER))
        block.set_gradient_divide_factor(1.0)  # micro-batches have the loss weights of the whole batch
        block.set_force_sum_reduction_for_comms(True)
    require(
        any(map(is_cut, model.parameters())),
        f"parallel.shard=true cuts linear layers of blocks, and {where} has none. Use parallel.shard=false",
    )
    decoder = decoder_of(model)
    fully_shard(decoder, mesh=mesh, ignored_params=set(decoder.parameters()))
    for number, block in enumerate(blocks):  # in the order of Passes, however many passes came before
        block.set_modules_to_backward_prefetch([blocks[max(0, number - 1)]])
        block.unshard()
        if content_of(block) != contents[number]:
            raise TrainingStopped(f"block {number} of the sharded base has other bytes than before it was cut")
        block.reshard()
    log.info("parallel.shard: this process keeps %s of %s bytes", f"{own_bytes(model):,}", f"{before:,}")
    return Passes(world, decoder, blocks)


def cut_parameters(block: torch.nn.Module, trained: bool) -> list[torch.nn.Parameter]:
    """The weights of the linear layers of `block` and their scales as parameters, which FSDP2 can cut.

    Without an adapter they are `trained`; else what is trained stays whole.
    """
    found: list[torch.nn.Parameter] = []
    for layer in [*block.modules()]:
        if isinstance(layer, PackedLinear):
            found += store_as_parameters(layer, left_out=TENSOR_SCALES)
        elif isinstance(layer, torch.nn.Linear) and layer.weight.requires_grad == trained:
            found.append(layer.get_parameter("weight"))
    return found


def own_bytes(model: torch.nn.Module) -> int:
    """Bytes of parameters and buffers that this rank holds."""
    return sum(own_part(tensor).nbytes for tensor in (*model.parameters(), *model.buffers()))


def content_of(block: torch.nn.Module) -> list[tuple[torch.dtype, torch.Size, int]]:
    """Dtype, shape and sum of the bytes of each parameter, which is whole."""
    tensors = [parameter.detach() for parameter in block.parameters()]
    sums = [tensor.contiguous().view(-1).view(torch.uint8).sum(dtype=torch.int64) for tensor in tensors]
    return [(tensor.dtype, tensor.shape, int(total)) for tensor, total in zip(tensors, sums, strict=True)]
