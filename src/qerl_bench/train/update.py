"""Train on one batch: forward and backward over micro-batches, clip, step; several times if the batch is reused.

Log-probabilities of the same tokens come from up to four policies:

- sampler: the engine with its noise; they came with the rollouts.
- trainer: the pass that computes the loss. It sees the sampler's noise only with noise.site=rollout_and_training.
- old: the denominator of the ratio, fixed before the first update: the trainer's, or with
  noise.site=rollout_and_old_logprobs those of a pass with the sampler's noise.
- reference: the base without its adapter, for the KL penalty.

Neither the split into micro-batches nor packing nor leaving out completions of advantage 0 changes the gradient.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from qerl_bench import metrics
from qerl_bench.algo.base import LossInputs
from qerl_bench.checks import TrainingStopped
from qerl_bench.device import bf16_matmuls, random_state, set_random_state, tf32_matmuls
from qerl_bench.experiment_spec import Experiment
from qerl_bench.gpu_share import release
from qerl_bench.memory import memory_for, shortage
from qerl_bench.model.lm_head import TokenStats, require_logprobs
from qerl_bench.model.packing import Packing
from qerl_bench.model.policy import Policy
from qerl_bench.model.routing import changed_choices
from qerl_bench.parallel import ALONE, World
from qerl_bench.rundir import RunDir
from qerl_bench.seeding import derive
from qerl_bench.shortages import shortages_of
from qerl_bench.train.batch import Batch
from qerl_bench.train.kept import TokenColumns
from qerl_bench.train.memory_plan import Size, after_shortage, micro_batch_size
from qerl_bench.train.micro_batches import MicroBatch, carry_over, sample_measured, split
from qerl_bench.train.nonfinite import NonFiniteError, dump, first_in_backward, first_in_forward
from qerl_bench.train.objective import objective
from qerl_bench.train.shares import GradientSum, rows_of_rank, turns
from qerl_bench.train.spec import OptimSpec, TrainSpec
from qerl_bench.train.static import StaticPasses, static_passes

log = logging.getLogger(__name__)
BETA1 = 0.9  # of AdamW


@dataclass
class Part:
    """What one micro-batch adds to the numbers of a step: on its device, and after `to_host` on the host, in FP64."""

    loss: float | torch.Tensor
    sums: Mapping[str, float | torch.Tensor]  # over its tokens
    tokens: metrics.TokenTable  # columns of per-token numbers, of the policy before the first update
    tokens_of: tuple[tuple[int, int], ...]  # that of its micro-batch

    def columns_by_row(self) -> dict[int, TokenColumns]:
        """The log-probabilities of each sequence, by its row in the step's batch, as `train/kept.py` calls them."""
        names = {"logprobs": "trained", "noisy_logprobs": "noisy"}
        sizes = [size for _, size in self.tokens_of]
        columns: dict[int, TokenColumns] = {row: {} for row, _ in self.tokens_of}
        for name, shown in names.items():
            if name in self.tokens.names():
                for (row, _), part in zip(self.tokens_of, self.tokens[name].split(sizes), strict=True):
                    columns[row][shown] = part.tolist()
        return columns


def make_optimizer(policy: Policy, optim: OptimSpec) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters, with states in FP32 or in the 8-bit blocks of bitsandbytes."""
    kind = torch.optim.AdamW
    if optim.optimizer == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit as kind  # type: ignore[assignment]
    return kind(policy.trainable, lr=optim.lr, betas=(BETA1, optim.beta2), weight_decay=optim.weight_decay)


def update(
    experiment: Experiment,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    run: RunDir,
    step: int,
    world: World = ALONE,
    columns: dict[int, TokenColumns] | None = None,
) -> dict[str, float]:
    """Make train.updates_per_batch updates on `batch` and return the training metrics of `step`.

    `columns`, if given, gets the log-probabilities that were computed before the first update, by row of the batch.

    All ranks of `world` have the whole batch, share its backward passes, and make the same updates.

    If a loss or gradient is not finite, the batch is dumped into the run directory. Then the update is skipped, or the
    run ends with TrainingStopped, as train.on_nonfinite says. If memory runs out, the update is repeated in smaller
    micro-batches, in which those of some steps are made then.
    """
    algo, optim, train = experiment.algo, experiment.optim, experiment.train
    lr = optim.lr_at(step, experiment.steps)
    for group in optimizer.param_groups:
        group["lr"] = lr
    batch = batch.to(torch.device("cpu"))  # what is decided about it waits for no GPU
    lengths = batch.mask.sum(1)
    has_gradient = torch.ones_like(batch.advantages, dtype=torch.bool)
    if algo.on_policy and experiment.kl.coef == 0 and train.entropy_coef == 0:
        has_gradient = batch.advantages != 0
    shortages_of(policy).begin(step)
    longest, exact = int(batch.lengths.max()), experiment.parallel.exact
    passes = static_passes(experiment, policy)
    records = all(world.gather(passes is not None))
    with precision(train, policy.device.type):
        size = world.from_first(lambda: micro_batch_size(train, policy, optimizer, longest, run, records))

    def micro_batches_of(size: Size) -> list[MicroBatch]:
        fixed = size.recorded and bool(has_gradient.any())
        trained = torch.ones_like(has_gradient) if fixed else has_gradient  # a recorded pass trains on every row
        rows = torch.ones_like(trained) if exact else rows_of_rank(batch.lengths, trained, world)
        pad_id = policy.pad_id if fixed else None
        parts = split(batch, algo.loss_weights(lengths), trained, rows, size.tokens, policy.device, pad_id)
        sample_measured(parts, train.mismatch_share, derive(experiment.seed, "mismatch", step))
        return parts

    micro_batches = micro_batches_of(size)
    totals = StepAccumulator()
    parts: dict[tuple[int, int], Part] = {}  # by update and place of the micro-batch among those of all ranks
    if world.size > 1:
        torch.manual_seed(derive(experiment.seed, "torch", step, world.rank))  # adapter dropout of other sequences
    policy.train_mode(True)
    for number in range(train.updates_per_batch):
        while True:
            optimizer.zero_grad(set_to_none=True)
            random = random_state(policy.device.type)
            try:
                with precision(train, policy.device.type):
                    done, norm, grad_norm = add_gradients(experiment, policy, micro_batches, passes, world)
                break
            except (RuntimeError, MemoryError) as error:
                if shortage(error) is None:  # one that ends the run, or only this rank
                    raise
                sampler = policy.kept.get("sampler")
                frees = any(world.gather(sampler is not None and sampler.kept is not None))
                size = after_shortage(error, size, train, policy, longest, run, not exact, frees)
            if passes is not None and not size.recorded:
                passes.forget()
            if (sampler := policy.kept.get("sampler")) is not None:
                sampler.release()  # sampling reserves again what it needs then
            release()  # only now: until here the traceback holds what was computed
            set_random_state(random)
            before, micro_batches = micro_batches, micro_batches_of(size)
            if number > 0:
                carry_over(before, micro_batches)
        parts |= {(number, place): part for place, _, part in done}
        totals.grad_norms.append(grad_norm)
        try:
            with world.together(NonFiniteError):
                for _, micro_batch, part in done:
                    if not math.isfinite(part.loss):
                        raise loss_error(policy, experiment.rollout.temperature, micro_batch)
            if not math.isfinite(grad_norm):
                raise NonFiniteError("gradient", first_in_backward(policy.model), batch.tensors())
        except NonFiniteError as error:
            message = world.from_first(lambda error=error: dump(run, step, error))
            if train.on_nonfinite == "stop":
                raise TrainingStopped(f"{message}. To skip such updates: train.on_nonfinite=skip") from None
            log.warning("%s. This update is skipped.", message)
            continue
        torch.nn.utils.clip_grads_with_norm_(policy.trainable, optim.max_grad_norm, norm)
        optimizer.step()
        totals.applied += 1
    optimizer.zero_grad(set_to_none=True)
    policy.train_mode(False)
    everywhere = {key: part for of_rank in world.gather(parts) for key, part in of_rank.items()}
    totals.include(everywhere[key] for key in sorted(everywhere))
    if columns is not None:
        for (number, _), part in everywhere.items():
            columns.update(part.columns_by_row() if number == 0 else {})
    return {
        "train/taught_frac": metrics.taught_frac(lengths, has_gradient),
        "train/micro_batches": sum(number == 0 for number, _ in everywhere),  # the first update makes all of them
        "lr": lr,
        "updates_skipped": train.updates_per_batch - totals.applied,
        **totals.metrics(train.updates_per_batch, algo.on_policy),
    }


def add_gradients(
    experiment: Experiment,
    policy: Policy,
    micro_batches: Sequence[MicroBatch],
    passes: StaticPasses | None,
    world: World,
) -> tuple[list[tuple[int, MicroBatch, Part]], torch.Tensor, float]:
    """The backward passes of one update, and the gradients of all ranks in the parameters.

    Returns what each micro-batch of this rank gave, with its place among those of all ranks, and the norm of the
    gradient, on the device and on the host. Raises an error of any rank's passes on all ranks.
    """
    exact = experiment.parallel.exact
    total = GradientSum(policy.trainable, world, exact)
    done: list[tuple[int, MicroBatch, Part]] = []
    for turn in turns(micro_batches, world, exact):
        with world.together(RuntimeError, MemoryError):  # such as PyTorch's when memory runs out
            for place, micro_batch in turn:
                if (part := forward_backward(experiment, policy, micro_batch, passes)) is not None:
                    done.append((place, micro_batch, part))
        with memory_for("train"):  # ends the run: only passes that failed on all ranks are repeated
            total.add()
    with memory_for("train"):
        total.put()
    with world.together(RuntimeError, MemoryError):
        norm = torch.nn.utils.get_total_norm([p.grad for p in policy.trainable if p.grad is not None])
        grad_norm = to_host([part for *_, part in done], norm.to(policy.device))  # the only wait for the GPU
    return done, norm, grad_norm


@contextmanager
def precision(train: TrainSpec, device: str) -> Iterator[None]:
    """Inside, training passes compute in the precision that `train` says."""
    with tf32_matmuls(train.tf32 and device == "cuda"), bf16_matmuls(train.autocast, device):
        yield


def forward_backward(
    experiment: Experiment, policy: Policy, micro_batch: MicroBatch, passes: StaticPasses | None = None
) -> Part | None:
    """Add the gradient of one micro-batch, and return its numbers.

    None if nothing was computed: its loss is 0, and its metrics were recorded in the first update.
    """
    batch, temperature, entropy_coef = micro_batch.batch, experiment.rollout.temperature, experiment.train.entropy_coef
    layout = micro_batch.layout
    is_first_update = micro_batch.old_logprobs is None
    if not (micro_batch.has_gradient or is_first_update):
        return None
    tokens = metrics.TokenTable()
    if passes is not None and micro_batch.static is not None:
        stats, loss, columns = passes(micro_batch.static)
        micro_batch.logprobs = stats.logprobs
        before_first_update(experiment, policy, micro_batch, stats, [], tokens)
        return Part(loss, sums_of(columns, layout), tokens, micro_batch.tokens_of)
    train_with_noise = experiment.noise.site == "rollout_and_training"
    training_noise = policy.noise.for_training if train_with_noise else nullcontext
    with (
        torch.set_grad_enabled(micro_batch.has_gradient),
        training_noise(),
        policy.routing(batch.mask, layout) as experts,
    ):
        stats = policy.token_stats(batch.input_ids, batch.mask, temperature, entropy_coef > 0, layout)
    micro_batch.logprobs = stats.logprobs.detach()
    if is_first_update:
        before_first_update(experiment, policy, micro_batch, stats, experts, tokens)
    assert micro_batch.old_logprobs is not None
    inputs = LossInputs(
        logprobs=stats.logprobs,
        old_logprobs=micro_batch.old_logprobs,
        advantages=batch.advantages,
        mask=batch.mask,
        reference_logprobs=micro_batch.reference_logprobs,
        importance_weights=micro_batch.importance_weights,
    )
    loss, columns = objective(experiment, inputs, micro_batch.loss_weights, stats.entropy)
    sums = sums_of(columns, layout)
    if micro_batch.has_gradient:
        with training_noise():  # recomputation repeats the forward pass
            loss.backward()
    return Part(loss.detach(), sums, tokens, micro_batch.tokens_of)


def sums_of(columns: dict[str, torch.Tensor], layout: Packing) -> dict[str, torch.Tensor]:
    """The sum of each column (B, T) over the completion tokens, a scalar in FP64 on the device."""
    return {name: layout.completion(column).detach().double().sum() for name, column in columns.items()}


def to_host(parts: Sequence[Part], grad_norm: torch.Tensor) -> float:
    """Bring the numbers of `parts` to the host, in place, and the norm, which is returned: one transfer, one wait."""
    columns = [column for part in parts for column in part.tokens.columns.values()]
    scalars = [torch.as_tensor(number) for part in parts for number in (part.loss, *part.sums.values())]
    tensors = [grad_norm, *scalars, *(tensor for column in columns for tensor in column)]
    sizes = [tensor.numel() for tensor in tensors]
    host = iter(torch.cat([tensor.detach().double().flatten() for tensor in tensors]).cpu().split(sizes))
    norm = float(next(host))
    for part in parts:
        part.loss = float(next(host))
        part.sums = {name: float(next(host)) for name in part.sums}
    for column in columns:
        column[:] = [next(host).clone() for _ in column]  # a part of it alone, since ranks exchange it
    return norm


def loss_error(policy: Policy, temperature: float, micro_batch: MicroBatch) -> NonFiniteError:
    """What to raise for a micro-batch whose loss is not finite."""
    batch = micro_batch.batch
    first = first_in_forward(policy.model, lambda: policy.token_stats(batch.input_ids, batch.mask, temperature))
    tensors = {
        "weights": micro_batch.loss_weights,
        "old_logprobs": micro_batch.old_logprobs,
        "logprobs": micro_batch.logprobs,
        "importance": micro_batch.importance_weights,
    }
    return NonFiniteError("loss", first, batch.tensors() | {name: x for name, x in tensors.items() if x is not None})


@torch.no_grad()
def before_first_update(
    experiment: Experiment,
    policy: Policy,
    micro_batch: MicroBatch,
    stats: TokenStats,
    experts: list[torch.Tensor],
    tokens: metrics.TokenTable,
) -> None:
    """Fix old and reference log-probabilities and importance weights, and record the policy before the step.

    `stats` and `experts` are those of the training pass. Another forward pass is made only if an option needs it.
    """
    batch, layout, algo, noise = micro_batch.batch, micro_batch.layout, experiment.algo, experiment.noise
    importance_sampling = experiment.importance_sampling
    records_split = importance_sampling.split_mismatch and noise.one_draw and algo.on_policy

    def forward() -> TokenStats:
        return policy.token_stats(batch.input_ids, batch.mask, experiment.rollout.temperature, False, layout)

    trainer_logprobs, clean = stats.logprobs.detach(), stats
    noisy_logprobs = trainer_logprobs  # of the trainer with the sampler's noise
    measured = True
    other_experts = experts  # with the noise if those of the training pass are without it, and the other way round
    if noise.site == "rollout_and_training":
        with policy.routing(batch.mask, layout) as other_experts:
            clean = forward()
    elif noise.site == "rollout_and_old_logprobs" or (records_split and policy.noise.present):
        measured = noise.site == "rollout_and_old_logprobs" or micro_batch.measures_noise
        if measured:
            with policy.noise.for_training(), policy.routing(batch.mask, layout) as other_experts:
                noisy_logprobs = forward().logprobs
    micro_batch.old_logprobs = noisy_logprobs if noise.site == "rollout_and_old_logprobs" else trainer_logprobs
    if experiment.kl.coef > 0:
        with policy.without_adapter():
            micro_batch.reference_logprobs = forward().logprobs
    tokens.add(
        logprobs=layout.completion(trainer_logprobs),
        sampler_logprobs=layout.completion(batch.sampler_logprobs),
        entropy=layout.completion(clean.entropy),
        entropy_t1=layout.completion(clean.entropy_t1),
    )
    gap = torch.where(batch.mask, (trainer_logprobs - batch.sampler_logprobs).double(), 0.0)
    tokens.add(sequence_gap=gap.sum(1).index_select(0, micro_batch.completed))
    if records_split:
        if measured:
            tokens.add(noisy_logprobs=layout.completion(noisy_logprobs))
        tokens.add(noisy_measured=torch.full_like(layout.scored, measured))
    if experts and (other_experts is not experts or not policy.noise.present):
        tokens.add(router_changed=changed_choices(experts, other_experts))
    if importance_sampling.mode != "none":
        raw = importance_sampling.importance_weights(micro_batch.old_logprobs, batch.sampler_logprobs, batch.mask)
        micro_batch.importance_weights = importance_sampling.clip_or_mask(raw)
        tokens.add(importance=layout.completion(micro_batch.importance_weights), importance_raw=layout.completion(raw))


class StepAccumulator:
    """Sums over all updates of a step. Every average is over all tokens, including those without gradient."""

    def __init__(self) -> None:
        self.tokens = metrics.TokenTable()  # per-token numbers of the policy before the first update
        self.loss = 0.0
        self.sums: dict[str, float] = {}
        self.grad_norms: list[float] = []
        self.applied = 0

    def include(self, parts: Iterable[Part]) -> None:
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
            **metrics.token_metrics(self.tokens, on_policy),
        }
