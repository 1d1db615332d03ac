"""Training passes of fixed shapes, which a GPU replays from a CUDA graph: for models so small that launching their
kernels takes longer than running them.

Micro-batches are padded to a few sizes. The first of a size is recorded, forward, loss and backward at once; later ones
copy their tensors into its inputs, replay it, and add its gradients to those of the update. Padding changes rounding
only. All recordings work in one piece of memory, as large as the largest needs (see `Recordings`); where there is no
room for it, passes are plain from then on. Left out: a clip and an optimizer step in the graph, which are a few
launches an update, and passes that need more than the policy as it trains (see `why_not`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from qerl_bench.algo.base import LossInputs
from qerl_bench.model.cut_tensors import REASON as SHARDED
from qerl_bench.model.kernels import is_small
from qerl_bench.model.keys_values import REASON as KV_ROUNDED
from qerl_bench.model.lm_head import TokenStats
from qerl_bench.model.merging import REASON as MERGED
from qerl_bench.model.packing import Packing
from qerl_bench.model.policy import Policy
from qerl_bench.quant.activations import REASON as ROUNDED
from qerl_bench.quant.base import NOT_ROUNDED
from qerl_bench.train.batch import Batch
from qerl_bench.train.memory_rule import POOL_SPARE
from qerl_bench.train.objective import objective
from qerl_bench.train.spec import Specs
from qerl_core.process.device import peak_bytes
from qerl_core.process.out_of_memory import shortage
from qerl_kernels.scratch import owned_by

log = logging.getLogger(__name__)
MOST_GRAPHS = 16  # each holds its inputs and outputs; they share the memory in between
WARM_UPS = 2  # passes before a recording: kernels are compiled and buffers made


def why_not(specs: Specs, policy: Policy) -> str | None:
    """Why the passes of this run cannot have fixed shapes, or None if they can."""
    train = specs.train
    reasons = {
        "train.capture=off": train.capture == "off",
        "there is no GPU": policy.device.type != "cuda",
        "the model keeps a GPU busy without": not is_small(policy.model),
        "train.packing is off": not policy.packing,
        ROUNDED: policy.rounding is not None,
        KV_ROUNDED: policy.kv.kinds.train != NOT_ROUNDED,
        MERGED: policy.merging is not None,
        SHARDED: policy.is_sharded,
        "the number of tokens of each expert differs": bool(policy.experts),
        f"train.recompute={train.recompute}": train.recompute != "none",
        f"train.updates_per_batch={train.updates_per_batch}": train.updates_per_batch > 1,
        f"noise.site={specs.noise.site}": specs.noise.site != "rollout",
        "kl.coef > 0": specs.kl.coef > 0,
        f"importance_sampling.mode={specs.importance_sampling.mode}": specs.importance_sampling.mode != "none",
        "lora.dropout > 0": specs.lora.rank > 0 and specs.lora.dropout > 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def bucket(count: int) -> int:
    """The smallest of 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ... that is at least `count`."""
    step = 1
    while 8 * step <= count:
        step *= 2
    return max(4, -(-count // step)) * step


def rows_that_fit(tokens: int, width: int) -> int:
    """How many sequences of up to `width` tokens, padded, are recorded in `tokens` tokens: a bucket, at least 4."""
    count = max(4, tokens // bucket(width))
    step = 1
    while 8 * step <= count:
        step *= 2
    return count // step * step


def least_tokens(width: int) -> int:
    """Of the smallest pass that can be recorded of sequences of `width` tokens."""
    return 4 * bucket(width)


@dataclass(frozen=True)
class PaddedInputs:
    """A micro-batch padded to a bucket of rows R, columns T and completion tokens M; `rows` and `width` are its own."""

    rows: int
    width: int
    tensors: dict[str, torch.Tensor]  # input_ids and mask (R, T), advantages and loss_weights (R,), scored (M,)

    @classmethod
    def of(cls, batch: Batch, loss_weights: torch.Tensor, pad_id: int) -> PaddedInputs:
        """From tensors on the host. Rows and columns that are added have no completion tokens and no weight.

        `scored` has the completion tokens, and then cells of the padding, which are scored in vain.
        """
        (rows, width), size = batch.input_ids.shape, (bucket(len(batch.input_ids)), bucket(batch.input_ids.shape[1]))
        input_ids, mask = torch.full(size, pad_id), torch.zeros(size, dtype=torch.bool)
        input_ids[:rows, :width], mask[:rows, :width] = batch.input_ids, batch.mask
        scored, others = mask.flatten().nonzero()[:, 0], ~mask
        others[:, 0] = False  # nothing comes before the first column
        added = others.flatten().nonzero()[: bucket(len(scored)) - len(scored), 0]
        more = (0, size[0] - rows)
        pad = torch.nn.functional.pad
        tensors = {
            "input_ids": input_ids,
            "mask": mask,
            "advantages": pad(batch.advantages, more),
            "loss_weights": pad(loss_weights, more),
            "scored": torch.cat([scored, added]),
        }
        return cls(rows, width, tensors)

    def to(self, device: torch.device) -> PaddedInputs:
        return PaddedInputs(self.rows, self.width, {name: x.to(device) for name, x in self.tensors.items()})

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.tensors["input_ids"].shape, len(self.tensors["scored"]))


@dataclass(frozen=True)
class PassOutputs:
    """What a pass computes from `PaddedInputs`; None for trainable parameters that it does not use."""

    stats: TokenStats
    loss: torch.Tensor
    columns: dict[str, torch.Tensor]
    gradients: list[torch.Tensor | None]

    def tensors(self) -> list[torch.Tensor]:
        own = [tensor for tensor in self.gradients if tensor is not None]
        return [*vars(self.stats).values(), self.loss, *self.columns.values(), *own]

    def places(self, gradients: list[torch.Tensor | None]) -> PassOutputs:
        """Room for as much, except that gradients go to `gradients`."""
        stats = TokenStats(**{name: torch.empty_like(tensor) for name, tensor in vars(self.stats).items()})
        columns = {name: torch.empty_like(tensor) for name, tensor in self.columns.items()}
        return PassOutputs(stats, torch.empty_like(self.loss), columns, gradients)


class Recordings:
    """Recorded passes by shape, which share one piece of memory of `room` bytes: no two are replayed at a time.

    PyTorch cuts a piece where it is used, and joins what is free again. Without the piece each shape adds blocks of its
    own sizes, which fit no other, to a pool that is never given back: five shapes took 48 GiB. So that nothing is left
    in the piece from one pass to the next, results and the buffers of kernels lie outside.
    """

    def __init__(self, room: int) -> None:
        self.room, self.pool = room, torch.cuda.graph_pool_handle() if room else None
        self.passes: dict[tuple[int, ...], tuple[PaddedInputs, torch.cuda.CUDAGraph, PassOutputs]] = {}
        self.gradients: list[torch.Tensor | None] | None = None  # of the latest replay, whatever its shape


class RecordedPasses:
    """The recorded passes of a policy by shape. On a CPU, where nothing is recorded, each call computes."""

    def __init__(self, specs: Specs, policy: Policy) -> None:
        self.specs, self.policy = specs, policy
        self.records = policy.device.type == "cuda"
        # The one stream of all that is recorded, and of what warms up before: cuBLAS has work space for each stream,
        # and that must not lie in the piece.
        self.stream = torch.cuda.Stream() if self.records else None
        self.release()

    @property
    def holds_memory(self) -> bool:
        return self.recordings.room > 0

    def release(self) -> None:
        """Let go of all recordings, and of their memory."""
        self.recordings = Recordings(0)

    def __call__(self, inputs: PaddedInputs) -> tuple[TokenStats, torch.Tensor, dict[str, torch.Tensor]]:
        """Add the gradient of a micro-batch; returns its statistics, without gradient, its loss and its columns."""
        outputs = self._outputs(inputs)
        sums, parts = [], []
        for parameter, gradient in zip(self.policy.trainable, outputs.gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient.clone()  # the graph writes to the same place again
            else:
                sums.append(parameter.grad)
                parts.append(gradient)
        if sums:
            torch._foreach_add_(sums, parts)  # pyright: ignore[reportPrivateImportUsage]

        def own(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[: inputs.rows, : inputs.width].detach().clone()

        stats = outputs.stats
        stats = TokenStats(own(stats.logprobs), own(stats.entropy), own(stats.entropy_t1), own(stats.likeliest))
        return stats, outputs.loss.clone(), {name: own(column) for name, column in outputs.columns.items()}

    def _outputs(self, inputs: PaddedInputs) -> PassOutputs:
        if inputs.shape not in self.recordings.passes:  # not held here: a recording may have to free them first
            if not self.records or len(self.recordings.passes) >= MOST_GRAPHS:
                return self.compute(inputs)
            try:
                self._record(inputs)
            except RuntimeError as error:
                for cause in (error, error.__context__):  # a recording that breaks off may say something else last
                    if cause is not None and shortage(cause) is not None:
                        raise cause from None
                log.warning("training passes are computed one by one, since recording one failed: %s", error)
                self.records = False
                return self.compute(inputs)
        place, graph, outputs = self.recordings.passes[inputs.shape]
        for name, tensor in inputs.tensors.items():
            place.tensors[name].copy_(tensor)
        graph.replay()
        return outputs

    def _record(self, inputs: PaddedInputs) -> None:
        """Record a pass of this shape, with inputs of its own."""
        place = PaddedInputs(inputs.rows, inputs.width, {name: x.clone() for name, x in inputs.tensors.items()})
        # gradients are returned, not accumulated, so PyTorch need not warn that it would wait for the other stream
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        assert self.stream is not None
        current = torch.cuda.current_stream()
        try:
            needed, outputs = self._warm_up(place)
            if needed > self.recordings.room:
                self.recordings = Recordings(int((1 + POOL_SPARE) * needed))  # in place of those before
                _, outputs = self._warm_up(place)
            recordings, graph = self.recordings, torch.cuda.CUDAGraph()
            with owned_by(recordings), torch.cuda.graph(graph, pool=recordings.pool, stream=self.stream):
                if not recordings.passes:
                    torch.empty(recordings.room, dtype=torch.uint8, device=self.policy.device)  # the piece, free again
                found = self.compute(place)
                with torch.no_grad():
                    torch._foreach_copy_(outputs.tensors(), found.tensors())  # pyright: ignore[reportPrivateImportUsage]
                del found
        finally:
            torch.cuda.set_stream(current)  # which a recording that breaks off does not set again
        recordings.passes[inputs.shape] = place, graph, outputs
        log.info("training pass recorded: %d x %d tokens, %d of them scored", *inputs.shape)

    def _warm_up(self, place: PaddedInputs) -> tuple[int, PassOutputs]:
        """Compute a pass with all its kernels. The bytes that it takes, and places for what it gives."""
        assert self.stream is not None
        recordings, current = self.recordings, torch.cuda.current_stream()
        found: list[PassOutputs] = []
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream), owned_by(recordings):
            for _ in range(WARM_UPS):
                found.clear()
                needed = peak_bytes("cuda", lambda: found.append(self.compute(place)))
        current.wait_stream(self.stream)
        if recordings.gradients is None:
            recordings.gradients = [None if x is None else torch.empty_like(x) for x in found[0].gradients]
        return needed, found[0].places(recordings.gradients)

    def compute(self, inputs: PaddedInputs) -> PassOutputs:
        """Forward, loss and backward, all of it on the device."""
        specs, policy, tensors = self.specs, self.policy, inputs.tensors
        mask, scored = tensors["mask"], tensors["scored"]
        rows, width = mask.shape
        offsets = torch.arange(0, mask.numel() + 1, width, dtype=torch.int32, device=mask.device)
        cells = torch.arange(mask.numel(), device=mask.device)
        layout = Packing(rows, width, width, cells, offsets, scored, scored, scored - 1, shared=None)
        with_entropy = specs.train.entropy_coef > 0
        found = policy.token_stats(tensors["input_ids"], mask, specs.rollout.temperature, with_entropy, layout)
        logprobs, entropy = (x.where(mask, 0.0) for x in (found.logprobs, found.entropy))
        stats = TokenStats(logprobs, entropy, found.entropy_t1.where(mask, 0.0), found.likeliest.where(mask, 0.0))
        inputs_of_loss = LossInputs(
            logprobs=logprobs, old_logprobs=logprobs.detach(), advantages=tensors["advantages"], mask=mask
        )
        loss, columns = objective(specs, inputs_of_loss, tensors["loss_weights"], entropy)
        gradients = torch.autograd.grad(loss, policy.trainable, allow_unused=True)
        return PassOutputs(stats, loss.detach(), columns, [*gradients])


def recorded_passes(specs: Specs, policy: Policy) -> RecordedPasses | None:
    """Those of `policy`; None, and a word in the log of a run that trains, if its passes have no fixed shapes."""
    reason = why_not(specs, policy)
    if reason is not None and specs.train.capture == "auto" and specs.steps > 0:
        log.info("training passes are not recorded: %s", reason)
    return None if reason is not None else RecordedPasses(specs, policy)
