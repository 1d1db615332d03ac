"""Train on one batch: forward and backward over micro-batches, clip, step; several times if the batch is reused.

Log-probabilities of the same tokens come from up to four policies:

- sampler: the engine with its noise; they came with the rollouts.
- trainer: the pass that computes the loss. It sees the sampler's noise only with noise.site=rollout_and_training.
- old: the denominator of the ratio, fixed before the first update: the trainer's, or with
  noise.site=rollout_and_old_logprobs those of a pass with the sampler's noise.
- reference: the base without its adapter, for the KL penalty and for kl_to_base.

Neither the split into micro-batches nor packing nor computing a group's prompt once nor leaving out completions of
advantage 0 changes the gradient.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from qerl_bench.model.cut_tensors import is_cut
from qerl_bench.model.lm_head import require_logprobs
from qerl_bench.model.policy import Policy
from qerl_bench.parallel import ALONE, World
from qerl_bench.train.batch import Batch
from qerl_bench.train.data_parallel import (
    GradientSum,
    missing_passes,
    norm_of_gradients,
    pass_without_gradient,
    rank_rows,
    schedule,
)
from qerl_bench.train.memory_plan import micro_batch_size
from qerl_bench.train.micro_batches import MicroBatch, carry_over, sample_measured, split
from qerl_bench.train.micro_pass import MicroBatchResult, forward_backward, loss_error, to_host
from qerl_bench.train.nonfinite import NonFiniteError, dump, first_in_backward
from qerl_bench.train.recorded_passes import RecordedPasses, recorded_passes
from qerl_bench.train.reduced_sizes import Size
from qerl_bench.train.retry_smaller import repeated_smaller
from qerl_bench.train.rollout_records import TokenColumns
from qerl_bench.train.spec import OptimSpec, Specs, TrainSpec
from qerl_bench.train.trainer_state import TrainerState
from qerl_core.checks import TrainingStopped
from qerl_core.metrics import compute
from qerl_core.process.device import bf16_matmuls, tf32_matmuls
from qerl_core.process.out_of_memory import memory_for
from qerl_core.rundir.run_dir import RunDir
from qerl_core.seeding import derive

log = logging.getLogger(__name__)
BETA1 = 0.9  # of AdamW


def make_optimizer(policy: Policy, optim: OptimSpec) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters, with states in FP32 or in the 8-bit blocks of bitsandbytes."""
    kind = torch.optim.AdamW
    if optim.optimizer == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit as kind  # type: ignore[assignment]
    options: dict[str, Any] = {"foreach": False} if any(map(is_cut, policy.trainable)) else {}  # kinds cannot be mixed
    return kind(policy.trainable, lr=optim.lr, betas=(BETA1, optim.beta2), weight_decay=optim.weight_decay, **options)


@dataclass(frozen=True)
class Gradients:
    """What the backward passes of one update gave on this rank, and the norm of the gradient of all ranks."""

    results: list[tuple[int, MicroBatch, MicroBatchResult]]  # with the place among the micro-batches of all ranks
    norm: torch.Tensor  # on the device
    grad_norm: float  # the same on the host


def update(
    specs: Specs,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    run: RunDir,
    step: int,
    world: World = ALONE,
    columns: dict[int, TokenColumns] | None = None,
    state: TrainerState | None = None,
) -> dict[str, float]:
    """Make train.updates_per_batch updates on `batch` and return the training metrics of `step`.

    `columns`, if given, gets the log-probabilities that were computed before the first update, by row of the batch.
    `state` is that of the run; without one this update is alone.

    All ranks of `world` have the whole batch, share its backward passes, and make the same updates.

    If a loss or gradient is not finite, the batch is dumped into the run directory. Then the update is skipped, or the
    run ends with TrainingStopped, as train.on_nonfinite says. If memory runs out, the update is repeated,
    as it was or in smaller micro-batches, in which those of some steps are made then.
    """
    algo, train = specs.algo, specs.train
    lr = specs.optim.lr_at(step, specs.steps)
    for group in optimizer.param_groups:
        group["lr"] = lr
    batch = batch.to(torch.device("cpu"))  # what is decided about it waits for no GPU
    lengths = batch.mask.sum(1)
    has_gradient = torch.ones_like(batch.advantages, dtype=torch.bool)
    if algo.on_policy and specs.kl.coef == 0 and train.entropy_coef == 0:
        has_gradient = batch.advantages != 0
    state = TrainerState(passes=recorded_passes(specs, policy)) if state is None else state
    state.shortages.begin(step)
    longest = int(batch.lengths.max())
    records = all(world.gather(state.passes is not None))
    with precision(train, policy.device.type):
        size = world.from_first(lambda: micro_batch_size(train, policy, optimizer, longest, run, records, state))
    make = partial(micro_batches_of, specs, policy, batch, has_gradient, step, world)

    def cut(size: Size) -> None:
        nonlocal micro_batches
        before, micro_batches = micro_batches, make(size)
        if number > 0:
            carry_over(before, micro_batches)

    def gradients() -> Gradients:
        optimizer.zero_grad(set_to_none=True)
        with precision(train, policy.device.type):
            return add_gradients(specs, policy, micro_batches, state.passes, world)

    micro_batches = make(size)
    totals = StepAccumulator()
    parts: dict[tuple[int, int], MicroBatchResult] = {}  # by update and place among all micro-batches
    if world.size > 1:
        torch.manual_seed(derive(specs.seed, "torch", step, world.rank))  # adapter dropout of other sequences
    policy.train_mode(True)
    for number in range(train.updates_per_batch):
        size, found = repeated_smaller(gradients, size, cut, specs, policy.device.type, run, longest, state, world)
        parts |= {(number, place): part for place, _, part in found.results}
        totals.grad_norms.append(found.grad_norm)
        totals.applied += apply_gradients(specs, policy, optimizer, batch, found, run, step, world)
    optimizer.zero_grad(set_to_none=True)
    policy.train_mode(False)
    everywhere = {key: part for of_rank in world.gather(parts) for key, part in of_rank.items()}
    totals.include(everywhere[key] for key in sorted(everywhere))
    if columns is not None:
        for (number, _), part in everywhere.items():
            columns.update(part.columns_by_row() if number == 0 else {})
    return {
        "train/taught_frac": compute.taught_frac(lengths, has_gradient),
        "train/micro_batches": sum(number == 0 for number, _ in everywhere),  # the first update makes all of them
        "lr": lr,
        "updates_skipped": train.updates_per_batch - totals.applied,
        **totals.metrics(train.updates_per_batch, algo.on_policy),
    }


def micro_batches_of(
    specs: Specs, policy: Policy, batch: Batch, has_gradient: torch.Tensor, step: int, world: World, size: Size
) -> list[MicroBatch]:
    """The micro-batches of this rank, of all ranks with parallel.exact, of at most `size`.

    `has_gradient` (N,) are the rows of `batch` that train; a recorded pass trains on every row.
    """
    fixed = size.recorded and bool(has_gradient.any())
    trained = torch.ones_like(has_gradient) if fixed else has_gradient
    weights, shares = specs.algo.loss_weights(batch.mask.sum(1)), policy.shares_prompts
    exact = specs.parallel.exact
    rows = torch.ones_like(trained) if exact else rank_rows(batch, trained, world, shares and not fixed)
    parts = split(batch, weights, trained, rows, size.tokens, policy.device, policy.pad_id if fixed else None, shares)
    seed = derive(specs.seed, "mismatch", step)
    sample_measured(parts, specs.train.mismatch_share, seed, specs.kl.measured_at(step))
    return parts


def add_gradients(
    specs: Specs, policy: Policy, micro_batches: Sequence[MicroBatch], passes: RecordedPasses | None, world: World
) -> Gradients:
    """The backward passes of one update, and the gradients of all ranks in the parameters.

    Raises an error of any rank's passes on all ranks.
    """
    exact = specs.parallel.exact
    total = GradientSum(policy.trainable, world, exact)
    done: list[tuple[int, MicroBatch, MicroBatchResult]] = []
    for turn in schedule(micro_batches, world, exact):
        missing = missing_passes(policy, sum(micro_batch.has_gradient for _, micro_batch in turn), world)
        with world.together(RuntimeError, MemoryError):  # such as PyTorch's when memory runs out
            for place, micro_batch in turn:
                if (part := forward_backward(specs, policy, micro_batch, passes)) is not None:
                    done.append((place, micro_batch, part))
            for _ in range(missing):
                pass_without_gradient(policy)
        with memory_for("train"):  # ends the run: only passes that failed on all ranks are repeated
            total.add()
    with memory_for("train"):
        total.write_back()
    with world.together(RuntimeError, MemoryError):
        norm = norm_of_gradients(policy.trainable, world)
        grad_norm = to_host([part for *_, part in done], norm.to(policy.device))  # the only wait for the GPU
    return Gradients(done, norm, grad_norm)


def apply_gradients(
    specs: Specs,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    batch_gradients: Gradients,
    run: RunDir,
    step: int,
    world: World,
) -> bool:
    """Clip and step after `add_gradients`, or skip this update, whose loss or gradient is not finite: False."""
    try:
        with world.together(NonFiniteError):
            for _, micro_batch, part in batch_gradients.results:
                if not math.isfinite(part.loss):
                    raise loss_error(policy, specs.rollout.temperature, micro_batch)
        if not math.isfinite(batch_gradients.grad_norm):
            raise NonFiniteError("gradient", first_in_backward(policy.model), batch.tensors())
    except NonFiniteError as error:
        message = world.from_first(lambda error=error: dump(run, step, error))
        if specs.train.on_nonfinite == "stop":
            raise TrainingStopped(f"{message}. To skip such updates: train.on_nonfinite=skip") from None
        log.warning("%s. This update is skipped.", message)
        return False
    for cut in (True, False):  # one call takes tensors of one kind
        trained = [parameter for parameter in policy.trainable if is_cut(parameter) == cut]
        torch.nn.utils.clip_grads_with_norm_(trained, specs.optim.max_grad_norm, batch_gradients.norm)
    optimizer.step()
    return True


@contextmanager
def precision(train: TrainSpec, device: str) -> Iterator[None]:
    """Inside, training passes compute in the precision that `train` says."""
    with tf32_matmuls(train.tf32 and device == "cuda"), bf16_matmuls(train.autocast, device):
        yield


class StepAccumulator:
    """Sums over all updates of a step. Every average is over all tokens, including those without gradient."""

    def __init__(self) -> None:
        self.tokens = compute.TokenTable()  # per-token numbers of the policy before the first update
        self.loss = 0.0
        self.sums: dict[str, float] = {}
        self.grad_norms: list[float] = []
        self.applied = 0

    def include(self, parts: Iterable[MicroBatchResult]) -> None:
        """Add `parts`, whose numbers are on the host, in this order."""
        for part in parts:
            self.loss += float(part.loss)
            for name, value in part.sums.items():
                self.sums[name] = self.sums.get(name, 0.0) + float(value)
            self.tokens.extend(part.tokens)
        require_logprobs(self.tokens["logprobs"])

    def metrics(self, updates: int, on_policy: bool) -> dict[str, float]:
        tokens = len(self.tokens["logprobs"])
        return {
            "loss": self.loss / updates,
            "grad_norm": sum(self.grad_norms) / len(self.grad_norms) if self.grad_norms else math.nan,
            **{name: value / (updates * tokens) for name, value in self.sums.items()},
            **compute.token_metrics(self.tokens, on_policy),
        }
