"""One training step: forward and backward over micro-batches, clip, step, as often as a rollout is used.

The gradient does not depend on the split into micro-batches, on packing, or on which completions are left out of the
backward pass because their advantage is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import torch

from qerl_bench import metrics
from qerl_bench.algo.base import Terms
from qerl_bench.algo.loss import objective
from qerl_bench.config import Experiment
from qerl_bench.model.lm_head import TokenStats
from qerl_bench.model.policy import Policy
from qerl_bench.train.batch import Batch
from qerl_bench.train.nonfinite import NonFinite, first_in_backward, first_in_forward
from qerl_bench.train.spec import OptimSpec

BETAS = (0.9, 0.99)  # as in QeRL's scripts


@dataclass
class Micro:
    """A micro-batch through all updates of a step."""

    batch: Batch
    weights: torch.Tensor  # (B,) what each token of a completion counts in the loss of the step
    teaches: bool  # its gradient can be other than zero
    old: torch.Tensor | None = None  # (B, T) log-probabilities before the first update
    reference: torch.Tensor | None = None  # (B, T) of the base without its adapter
    importance: torch.Tensor | None = None  # (B, T) old over sampler, bounded


class Skipped(Exception):
    """This update must not be applied."""


def make_optimizer(policy: Policy, optim: OptimSpec) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters, its states in FP32 or, as bitsandbytes keeps them, in blocks of 8 bits."""
    kind = torch.optim.AdamW
    if optim.optimizer == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit as kind  # type: ignore[assignment]
    return kind(policy.trainable, lr=optim.lr, betas=BETAS, weight_decay=optim.weight_decay)


def update(
    experiment: Experiment,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    step: int,
    on_nonfinite: Callable[[NonFinite], None],
) -> dict[str, float]:
    """Train on `batch` and return the training metrics of `step`.

    The log-probabilities before the first of `train.updates_per_batch` updates are the old ones of all. `on_nonfinite` is called
    with the findings if a loss or gradient is not finite; if it returns, that update is skipped.
    """
    optim, train = experiment.optim, experiment.train
    lr = optim.lr_at(step, experiment.steps)
    for group in optimizer.param_groups:
        group["lr"] = lr
    taught = teaching(experiment, batch)
    micros = split(experiment, batch, taught)
    measured = Measured()
    policy.train_mode(True)
    for _ in range(train.updates_per_batch):
        optimizer.zero_grad(set_to_none=True)
        with suppress(Skipped):
            for micro in micros:
                train_on(experiment, policy, micro, measured, on_nonfinite)
            norm = torch.nn.utils.clip_grad_norm_(policy.trainable, optim.max_grad_norm)
            measured.grad_norms.append(float(norm))
            if not math.isfinite(float(norm)):
                where = first_in_backward(policy.model)
                on_nonfinite(NonFinite(what="gradient", tensor=where, tensors=batch.tensors()))
                raise Skipped
            optimizer.step()
            measured.applied += 1
    optimizer.zero_grad(set_to_none=True)
    policy.train_mode(False)
    return {
        "train/taught_frac": metrics.taught_frac(batch.mask.sum(1), taught),
        "lr": lr,
        "updates_skipped": train.updates_per_batch - measured.applied,
        **measured.metrics(train.updates_per_batch, experiment),
    }


def teaching(experiment: Experiment, batch: Batch) -> torch.Tensor:
    """The completions (B,) whose gradient can be other than zero: the others have advantage 0 and no other term."""
    if experiment.algo.on_policy and experiment.kl.coef == 0 and experiment.train.entropy_coef == 0:
        return batch.advantages != 0
    return torch.ones_like(batch.advantages, dtype=torch.bool)


def split(experiment: Experiment, batch: Batch, teaches: torch.Tensor) -> list[Micro]:
    """Micro-batches, first those with a gradient. Weights are those of the whole step, whoever is left out."""
    weights = experiment.algo.weights(batch.mask.sum(1))
    return [
        Micro(batch.rows(rows), weights[rows], teaches=taught)
        for taught, among in ((True, teaches), (False, ~teaches))
        for rows in batch.micro_batches(experiment.train.micro_batch_size, among)
    ]


def train_on(
    experiment: Experiment,
    policy: Policy,
    micro: Micro,
    measured: Measured,
    on_nonfinite: Callable[[NonFinite], None],
) -> None:
    """Forward and, where it teaches, backward of one micro-batch; raises Skipped if its loss is not finite.

    `noise.site` says how much of this sees the noise that the batch was sampled with.
    """
    batch, temperature, first = micro.batch, experiment.rollout.temperature, micro.old is None
    site, bonus = experiment.noise.site, experiment.train.entropy_coef
    seen = policy.noise.for_training if site == "rollout_and_training" else nullcontext
    if not (micro.teaches or first):
        return  # its loss is 0 before and after, and its metrics are known
    with torch.set_grad_enabled(micro.teaches), seen():
        stats = policy.token_stats(batch.input_ids, batch.mask, temperature, bonus > 0)
    if first:
        before_updates(experiment, policy, micro, stats, measured.tokens)
    assert micro.old is not None
    terms = Terms(
        logprobs=stats.logprobs,
        old_logprobs=micro.old,
        advantages=batch.advantages,
        mask=batch.mask,
        reference_logprobs=micro.reference,
        importance=micro.importance,
    )
    loss, columns = objective(experiment.algo, experiment.kl, terms, micro.weights)
    if bonus > 0:
        loss = loss - bonus * (micro.weights[:, None] * stats.entropy).sum()
    measured.add(loss, columns, batch.mask)
    if not bool(loss.isfinite()):
        where = first_in_forward(policy.model, lambda: policy.token_stats(batch.input_ids, batch.mask, temperature))
        scored = {"weights": micro.weights, "old_logprobs": micro.old, "logprobs": stats.logprobs.detach()}
        tensors = batch.tensors() | scored
        if micro.importance is not None:
            tensors["importance"] = micro.importance
        on_nonfinite(NonFinite(what="loss", tensor=where, tensors=tensors))
        raise Skipped
    if micro.teaches:
        with seen():  # gradient checkpointing computes the forward pass again
            loss.backward()


@torch.no_grad()
def before_updates(
    experiment: Experiment, policy: Policy, micro: Micro, stats: TokenStats, tokens: metrics.TokenTable
) -> None:
    """Fix what all updates of `micro` share, and put into `tokens` what is known of the policy before the first.

    `stats` are of the forward pass that trains. Others are made only where an option needs them.
    """
    batch, site = micro.batch, experiment.noise.site
    split = experiment.importance_sampling.split_mismatch and experiment.noise.one_draw and experiment.algo.on_policy

    def forward() -> TokenStats:
        return policy.token_stats(batch.input_ids, batch.mask, experiment.rollout.temperature)

    trained, clean = stats.logprobs.detach(), stats
    noisy = trained  # of the trainer with the noise that the sampler had
    if site == "rollout_and_training":
        clean = forward()
    elif site == "rollout_and_old_logprobs" or (split and policy.noise.present):
        with policy.noise.for_training():
            noisy = forward().logprobs
    micro.old = noisy if site == "rollout_and_old_logprobs" else trained
    if experiment.kl.coef > 0:
        with policy.without_adapter():
            micro.reference = forward().logprobs
    tokens.add(
        batch.mask,
        logprobs=trained,
        sampler_logprobs=batch.sampler_logprobs,
        entropy=clean.entropy,
        entropy_t1=clean.entropy_t1,
    )
    gap = torch.where(batch.mask, (trained - batch.sampler_logprobs).double(), 0.0)
    tokens.add(batch.mask.any(1), sequence_gap=gap.sum(1))
    if split:
        tokens.add(batch.mask, noisy_logprobs=noisy)
    if experiment.importance_sampling.mode != "none":
        raw = experiment.importance_sampling.raw(micro.old, batch.sampler_logprobs, batch.mask)
        micro.importance = experiment.importance_sampling.bounded(raw)
        tokens.add(batch.mask, importance=micro.importance, importance_raw=raw)


class Measured:
    """Sums over all updates of a step. Tokens that no longer count in later updates still count in their averages."""

    def __init__(self) -> None:
        self.tokens = metrics.TokenTable()  # of the first update: the policy before the step
        self.loss = 0.0
        self.sums: dict[str, float] = {}
        self.grad_norms: list[float] = []
        self.applied = 0

    def add(self, loss: torch.Tensor, columns: dict[str, torch.Tensor], mask: torch.Tensor) -> None:
        self.loss += loss.item()
        for name, column in columns.items():
            self.sums[name] = self.sums.get(name, 0.0) + column.detach()[mask].double().sum().item()

    def metrics(self, updates: int, experiment: Experiment) -> dict[str, float]:
        tokens = len(self.tokens["logprobs"])
        return {
            "loss": self.loss / updates,
            "grad_norm": sum(self.grad_norms) / len(self.grad_norms) if self.grad_norms else math.nan,
            **{name: value / (updates * tokens) for name, value in self.sums.items()},
            **metrics.of_tokens(self.tokens, sampled=experiment.algo.on_policy),
        }
