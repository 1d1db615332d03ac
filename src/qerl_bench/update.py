"""One optimiser step: forward and backward over micro-batches, clip, step. The gradient does not depend on the split."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from qerl_bench import metrics
from qerl_bench.algo.base import Algorithm
from qerl_bench.batch import Batch
from qerl_bench.config import OptimSpec
from qerl_bench.policy import Policy


def make_optimizer(policy: Policy, optim: OptimSpec) -> torch.optim.Optimizer:
    """AdamW (betas 0.9, 0.99 as in QeRL's scripts) over the trainable parameters."""
    return torch.optim.AdamW(policy.trainable, lr=optim.lr, betas=(0.9, 0.99), weight_decay=optim.weight_decay)


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    algo: Algorithm,
    batch: Batch,
    optim: OptimSpec,
    step: int,
    total_steps: int,
    temperature: float,
) -> dict[str, float]:
    """Train on `batch` once and return the training metrics of step `step`, measured on the policy before the update.

    `inject.site` says how much of the training pass sees the noise that the batch was sampled with.
    """
    totals = batch.totals
    lr = optim.lr_at(step, total_steps)
    for group in optimizer.param_groups:
        group["lr"] = lr
    site = policy.aqn.injection.site
    policy.train_mode(True)
    tokens = metrics.TokenTable()
    loss_sum = 0.0
    for micro in batch.micro_batches(optim.micro_batch):
        with policy.aqn.trainer() if site == "trainer" else nullcontext():
            stats = policy.token_stats(micro.input_ids, micro.mask, temperature, optim.entropy_coef > 0)
            trained = stats.logprobs.detach()
            old = trained  # one update per rollout: the policy before it is the policy itself
            if site == "old":
                with policy.aqn.trainer(), torch.no_grad():
                    old = policy.token_stats(micro.input_ids, micro.mask, temperature).logprobs
            loss, indicators = algo.loss(stats.logprobs, old, micro.advantages, micro.mask, totals)
            if optim.entropy_coef > 0:
                loss = loss - optim.entropy_coef * stats.entropy.sum() / totals.tokens
            loss.backward()
        clean = stats
        if site == "trainer":
            with torch.no_grad():
                clean = policy.token_stats(micro.input_ids, micro.mask, temperature)
        loss_sum += loss.item()
        tokens.add(
            micro.mask,
            logprobs=trained,
            sampler_logprobs=micro.sampler_logprobs,
            entropy=clean.entropy,
            entropy_t1=clean.entropy_t1,
            **indicators,
        )
    policy.train_mode(False)
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.trainable, optim.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    measured = metrics.of_tokens(tokens, sampled=algo.on_policy)
    return {"loss": loss_sum, "grad_norm": float(grad_norm), "lr": lr, **measured}
