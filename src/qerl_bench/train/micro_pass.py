"""The training pass of one micro-batch: its gradient, its numbers, and what it fixes before the first update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from qerl_bench.algo.base import LossInputs
from qerl_bench.model.lm_head import TokenStats
from qerl_bench.model.packing import Packing
from qerl_bench.model.policy import Policy
from qerl_bench.model.routing import changed_choices
from qerl_bench.train.micro_batches import MicroBatch
from qerl_bench.train.nonfinite import NonFiniteError, first_in_forward
from qerl_bench.train.objective import objective
from qerl_bench.train.recorded_passes import RecordedPasses
from qerl_bench.train.rollout_records import TokenColumns
from qerl_bench.train.spec import Specs
from qerl_core.metrics.compute import TokenTable


@dataclass
class MicroBatchResult:
    """What one micro-batch adds to the numbers of a step: on its device, and after `to_host` on the host, in FP64."""

    loss: float | torch.Tensor
    sums: Mapping[str, float | torch.Tensor]  # over its tokens
    tokens: TokenTable  # columns of per-token numbers, of the policy before the first update
    tokens_of: tuple[tuple[int, int], ...]  # that of its micro-batch

    def columns_by_row(self) -> dict[int, TokenColumns]:
        """The log-probabilities of each sequence by its row in the step's batch, with the names of rollouts.jsonl."""
        names = {"logprobs": "trained", "noisy_logprobs": "noisy"}
        sizes = [size for _, size in self.tokens_of]
        columns: dict[int, TokenColumns] = {row: {} for row, _ in self.tokens_of}
        for name, shown in names.items():
            if name in self.tokens.names():
                for (row, _), part in zip(self.tokens_of, self.tokens[name].split(sizes), strict=True):
                    columns[row][shown] = part.tolist()
        return columns


def forward_backward(
    specs: Specs, policy: Policy, micro_batch: MicroBatch, passes: RecordedPasses | None = None
) -> MicroBatchResult | None:
    """Add the gradient of one micro-batch, and return its numbers.

    None if nothing was computed: its loss is 0, and its metrics were recorded in the first update.
    """
    batch, temperature, entropy_coef = micro_batch.batch, specs.rollout.temperature, specs.train.entropy_coef
    layout = micro_batch.layout
    is_first_update = micro_batch.old_logprobs is None
    if not (micro_batch.has_gradient or is_first_update):
        return None
    tokens = TokenTable()
    if passes is not None and micro_batch.padded is not None:
        stats, loss, columns = passes(micro_batch.padded)
        micro_batch.logprobs = stats.logprobs
        before_first_update(specs, policy, micro_batch, stats, [], tokens)
        return MicroBatchResult(loss, sums_of(columns, layout), tokens, micro_batch.tokens_of)
    train_with_noise = specs.noise.site == "rollout_and_training"
    training_noise = policy.noise.for_training if train_with_noise else nullcontext
    with (
        torch.set_grad_enabled(micro_batch.has_gradient),
        training_noise(),
        policy.routing(batch.mask, layout) as experts,
    ):
        stats = policy.token_stats(batch.input_ids, batch.mask, temperature, entropy_coef > 0, layout)
    micro_batch.logprobs = stats.logprobs.detach()
    if is_first_update:
        before_first_update(specs, policy, micro_batch, stats, experts, tokens)
    assert micro_batch.old_logprobs is not None
    inputs = LossInputs(
        logprobs=stats.logprobs,
        old_logprobs=micro_batch.old_logprobs,
        advantages=batch.advantages,
        mask=batch.mask,
        reference_logprobs=micro_batch.reference_logprobs,
        importance_weights=micro_batch.importance_weights,
    )
    loss, columns = objective(specs, inputs, micro_batch.loss_weights, stats.entropy)
    sums = sums_of(columns, layout)
    if micro_batch.has_gradient:
        with training_noise():  # recomputation repeats the forward pass
            loss.backward()
    return MicroBatchResult(loss.detach(), sums, tokens, micro_batch.tokens_of)


def sums_of(columns: dict[str, torch.Tensor], layout: Packing) -> dict[str, torch.Tensor]:
    """The sum of each column (B, T) over the completion tokens, a scalar in FP64 on the device."""
    return {name: layout.completion(column).detach().double().sum() for name, column in columns.items()}


def to_host(parts: Sequence[MicroBatchResult], grad_norm: torch.Tensor) -> float:
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
    specs: Specs,
    policy: Policy,
    micro_batch: MicroBatch,
    stats: TokenStats,
    experts: list[torch.Tensor],
    tokens: TokenTable,
) -> None:
    """Fix old and reference log-probabilities and importance weights, and record the policy before the step.

    `stats` and `experts` are those of the training pass. Another forward pass is made only if an option needs it.
    """
    batch, layout, algo, noise = micro_batch.batch, micro_batch.layout, specs.algo, specs.noise
    importance_sampling = specs.importance_sampling
    records_split = importance_sampling.split_mismatch and noise.one_draw and algo.on_policy

    def forward() -> TokenStats:
        return policy.token_stats(batch.input_ids, batch.mask, specs.rollout.temperature, False, layout)

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
    if specs.kl.coef > 0 or micro_batch.measures_base:
        with policy.without_adapter():
            of_base = forward().logprobs
        micro_batch.reference_logprobs = of_base if specs.kl.coef > 0 else None
        if micro_batch.measures_base:
            tokens.add(base_gap=layout.completion(of_base - clean.logprobs))
    tokens.add(
        logprobs=layout.completion(trainer_logprobs),
        sampler_logprobs=layout.completion(batch.sampler_logprobs),
        entropy=layout.completion(clean.entropy),
        entropy_t1=layout.completion(clean.entropy_t1),
        position=layout.completion(batch.mask.cumsum(1)),  # in its completion, from 1
        advantages=layout.completion(batch.advantages[:, None].expand_as(batch.mask)),
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
