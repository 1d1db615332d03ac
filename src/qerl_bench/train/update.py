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
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from qerl_bench import metrics
from qerl_bench.algo.base import LossInputs
from qerl_bench.algo.loss import step_loss
from qerl_bench.checks import TrainingStopped
from qerl_bench.config import Experiment
from qerl_bench.model.lm_head import TokenStats
from qerl_bench.model.policy import Policy
from qerl_bench.model.routing import changed_choices
from qerl_bench.parallel import ALONE, World
from qerl_bench.rundir import RunDir
from qerl_bench.seeding import derive
from qerl_bench.train.batch import Batch
from qerl_bench.train.nonfinite import NonFiniteError, dump, first_in_backward, first_in_forward
from qerl_bench.train.shares import GradientSum, rows_of_rank, turns
from qerl_bench.train.spec import OptimSpec

log = logging.getLogger(__name__)
BETAS = (0.9, 0.99)  # as in QeRL's scripts


@dataclass
class MicroBatch:
    """A micro-batch and the numbers that stay fixed through all updates on it."""

    batch: Batch
    loss_weights: torch.Tensor  # (B,) how much each token of a completion counts in the loss of the step
    has_gradient: bool  # False: the loss is 0 whatever the policy, so it needs no backward pass
    old_logprobs: torch.Tensor | None = None  # (B, T), None before the first update
    reference_logprobs: torch.Tensor | None = None  # (B, T)
    importance_weights: torch.Tensor | None = None  # (B, T) old / sampler, truncated or masked


def make_optimizer(policy: Policy, optim: OptimSpec) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters, with states in FP32 or in the 8-bit blocks of bitsandbytes."""
    kind = torch.optim.AdamW
    if optim.optimizer == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit as kind  # type: ignore[assignment]
    return kind(policy.trainable, lr=optim.lr, betas=BETAS, weight_decay=optim.weight_decay)


def update(
    experiment: Experiment,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    run: RunDir,
    step: int,
    world: World = ALONE,
) -> dict[str, float]:
    """Make train.updates_per_batch updates on `batch` and return the training metrics of `step`.

    All ranks of `world` have the whole batch, share its backward passes, and make the same updates.

    If a loss or gradient is not finite, the batch is dumped into the run directory. Then the update is skipped, or the
    run ends with TrainingStopped, as train.on_nonfinite says.
    """
    algo, optim, train = experiment.algo, experiment.optim, experiment.train
    lr = optim.lr_at(step, experiment.steps)
    for group in optimizer.param_groups:
        group["lr"] = lr
    has_gradient = torch.ones_like(batch.advantages, dtype=torch.bool)
    if algo.on_policy and experiment.kl.coef == 0 and train.entropy_coef == 0:
        has_gradient = batch.advantages != 0
    exact = experiment.parallel.exact
    rows = torch.ones_like(has_gradient) if exact else rows_of_rank(batch.lengths, has_gradient, world)
    loss_weights = algo.loss_weights(batch.mask.sum(1))
    micro_batches = split(batch, loss_weights, has_gradient, rows, train.micro_batch_size)
    totals = StepAccumulator()
    parts: dict[tuple[int, int], StepAccumulator] = {}  # by update and micro-batch
    if world.size > 1:
        torch.manual_seed(derive(experiment.seed, "torch", step, world.rank))  # adapter dropout of other sequences
    policy.train_mode(True)
    for number in range(train.updates_per_batch):
        optimizer.zero_grad(set_to_none=True)
        gradients = GradientSum(policy.trainable, world, exact)
        try:
            for turn in turns(micro_batches, world, exact):
                with world.together(NonFiniteError):
                    for place, micro_batch in turn:
                        part = parts[number, place] = StepAccumulator()
                        forward_backward(experiment, policy, micro_batch, part)
                gradients.add()
            gradients.put()
            grad_norm = float(torch.nn.utils.clip_grad_norm_(policy.trainable, optim.max_grad_norm))
            totals.grad_norms.append(grad_norm)
            if not math.isfinite(grad_norm):
                raise NonFiniteError("gradient", first_in_backward(policy.model), batch.tensors())
        except NonFiniteError as error:
            message = dump(run, step, error)
            if train.on_nonfinite == "stop":
                raise TrainingStopped(f"{message}. To skip such updates: train.on_nonfinite=skip") from None
            log.warning("%s. This update is skipped.", message)
            continue
        optimizer.step()
        totals.applied += 1
    optimizer.zero_grad(set_to_none=True)
    policy.train_mode(False)
    totals.include({key: part for of_rank in world.gather(parts) for key, part in of_rank.items()})
    return {
        "train/taught_frac": metrics.taught_frac(batch.mask.sum(1), has_gradient),
        "lr": lr,
        "updates_skipped": train.updates_per_batch - totals.applied,
        **totals.metrics(train.updates_per_batch, algo.on_policy),
    }


def split(
    batch: Batch, loss_weights: torch.Tensor, has_gradient: torch.Tensor, rows: torch.Tensor, size: int
) -> list[MicroBatch]:
    """Micro-batches of at most `size` of the sequences `rows` (B,): first where `has_gradient` (B,), then the others.

    `loss_weights` (B,) are made from the lengths of the whole batch, so the losses of micro-batches add up.
    """
    return [
        MicroBatch(batch.rows(chosen), loss_weights[chosen], has_gradient=value)
        for value, selected in ((True, has_gradient & rows), (False, ~has_gradient & rows))
        for chosen in batch.micro_batches(size, selected)
    ]


def forward_backward(experiment: Experiment, policy: Policy, micro_batch: MicroBatch, totals: StepAccumulator) -> None:
    """Add the gradient and the metrics of one micro-batch. Raises NonFiniteError if its loss is not finite."""
    batch, temperature, entropy_coef = micro_batch.batch, experiment.rollout.temperature, experiment.train.entropy_coef
    is_first_update = micro_batch.old_logprobs is None
    if not (micro_batch.has_gradient or is_first_update):
        return  # its loss is 0, and its metrics were recorded in the first update
    train_with_noise = experiment.noise.site == "rollout_and_training"
    training_noise = policy.noise.for_training if train_with_noise else nullcontext
    with torch.set_grad_enabled(micro_batch.has_gradient), training_noise(), policy.routing(batch.mask) as experts:
        stats = policy.token_stats(batch.input_ids, batch.mask, temperature, entropy_coef > 0)
    if is_first_update:
        before_first_update(experiment, policy, micro_batch, stats, experts, totals.tokens)
    assert micro_batch.old_logprobs is not None
    inputs = LossInputs(
        logprobs=stats.logprobs,
        old_logprobs=micro_batch.old_logprobs,
        advantages=batch.advantages,
        mask=batch.mask,
        reference_logprobs=micro_batch.reference_logprobs,
        importance_weights=micro_batch.importance_weights,
    )
    loss, columns = step_loss(experiment.algo, experiment.kl, inputs, micro_batch.loss_weights)
    if entropy_coef > 0:
        loss = loss - entropy_coef * (micro_batch.loss_weights[:, None] * stats.entropy).sum()
    totals.add(loss, columns, batch.mask)
    if not bool(loss.isfinite()):
        first = first_in_forward(policy.model, lambda: policy.token_stats(batch.input_ids, batch.mask, temperature))
        tensors = {
            "weights": micro_batch.loss_weights,
            "old_logprobs": micro_batch.old_logprobs,
            "logprobs": stats.logprobs,
        }
        if micro_batch.importance_weights is not None:
            tensors["importance"] = micro_batch.importance_weights
        raise NonFiniteError("loss", first, batch.tensors() | tensors)
    if micro_batch.has_gradient:
        with training_noise():  # gradient checkpointing repeats the forward pass
            loss.backward()


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
    batch, algo, noise = micro_batch.batch, experiment.algo, experiment.noise
    importance_sampling = experiment.importance_sampling
    records_split = importance_sampling.split_mismatch and noise.one_draw and algo.on_policy

    def forward() -> TokenStats:
        return policy.token_stats(batch.input_ids, batch.mask, experiment.rollout.temperature)

    trainer_logprobs, clean = stats.logprobs.detach(), stats
    noisy_logprobs = trainer_logprobs  # of the trainer with the sampler's noise
    other_experts = experts  # with the noise if those of the training pass are without it, and the other way round
    if noise.site == "rollout_and_training":
        with policy.routing(batch.mask) as other_experts:
            clean = forward()
    elif noise.site == "rollout_and_old_logprobs" or (records_split and policy.noise.present):
        with policy.noise.for_training(), policy.routing(batch.mask) as other_experts:
            noisy_logprobs = forward().logprobs
    micro_batch.old_logprobs = noisy_logprobs if noise.site == "rollout_and_old_logprobs" else trainer_logprobs
    if experiment.kl.coef > 0:
        with policy.without_adapter():
            micro_batch.reference_logprobs = forward().logprobs
    tokens.add(
        batch.mask,
        logprobs=trainer_logprobs,
        sampler_logprobs=batch.sampler_logprobs,
        entropy=clean.entropy,
        entropy_t1=clean.entropy_t1,
    )
    gap = torch.where(batch.mask, (trainer_logprobs - batch.sampler_logprobs).double(), 0.0)
    tokens.add(batch.mask.any(1), sequence_gap=gap.sum(1))
    if records_split:
        tokens.add(batch.mask, noisy_logprobs=noisy_logprobs)
    if experts and (other_experts is not experts or not policy.noise.present):
        changed = changed_choices(experts, other_experts)
        tokens.add(torch.ones_like(changed), router_changed=changed)
    if importance_sampling.mode != "none":
        raw = importance_sampling.importance_weights(micro_batch.old_logprobs, batch.sampler_logprobs, batch.mask)
        micro_batch.importance_weights = importance_sampling.clip_or_mask(raw)
        tokens.add(batch.mask, importance=micro_batch.importance_weights, importance_raw=raw)


class StepAccumulator:
    """Sums over all updates of a step. Every average is over all tokens, including those without gradient."""

    def __init__(self) -> None:
        self.tokens = metrics.TokenTable()  # per-token numbers of the policy before the first update
        self.loss = 0.0
        self.sums: dict[str, float] = {}
        self.grad_norms: list[float] = []
        self.applied = 0

    def add(self, loss: torch.Tensor, columns: dict[str, torch.Tensor], mask: torch.Tensor) -> None:
        self.loss += loss.item()
        for name, column in columns.items():
            self.sums[name] = self.sums.get(name, 0.0) + column.detach()[mask].double().sum().item()

    def include(self, parts: dict[tuple[int, int], StepAccumulator]) -> None:
        """Add what was summed over micro-batches, in order of update and place."""
        for _, part in sorted(parts.items()):
            self.loss += part.loss
            for name, value in part.sums.items():
                self.sums[name] = self.sums.get(name, 0.0) + value
            self.tokens.extend(part.tokens)

    def metrics(self, updates: int, on_policy: bool) -> dict[str, float]:
        tokens = len(self.tokens["logprobs"])
        return {
            "loss": self.loss / updates,
            "grad_norm": sum(self.grad_norms) / len(self.grad_norms) if self.grad_norms else math.nan,
            **{name: value / (updates * tokens) for name, value in self.sums.items()},
            **metrics.token_metrics(self.tokens, on_policy),
        }
