"""Proof that the engine answered with the adapter: the failure that made published numbers those of the base model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qerl_bench.records import Rollout

if TYPE_CHECKING:
    from qerl_bench.model.policy import Policy

PROBES = 16  # completions looked at
VISIBLE = {"torch.float32": 1e-3, "16 bit": 0.05}  # nats; a smaller mean effect may hide behind rounding
ROUNDING = {"torch.float32": 1e-3, "16 bit": 0.2}  # nats; a larger mean gap of engine and trainer is no rounding
UNTRAINED = 1e-4  # largest weight of B up to which an adapter may be without any effect


def adapter_probe(policy: Policy, rollouts: list[Rollout], temperature: float = 1.0) -> dict[str, float]:
    """Mean absolute log-probability gaps, at `temperature`, on a few completions that the engine wrote.

    `adapter_effect`: trainer with its adapter against trainer without it; 0 before training. `engine_gap`: engine
    against trainer with its adapter; only rounding. Raises AssertionError

    - if the adapter has weights and no effect: then the trainer itself runs without it;
    - if the adapter has visibly changed the policy and the engine is nearer to the base model;
    - if engine and trainer differ by more than rounding: then the engine runs something else altogether.

    Empty without an adapter.
    """
    if policy.adapter is None:
        return {}
    import torch

    from qerl_bench.train.batch import make_batch

    chosen = rollouts[:PROBES]
    batch = make_batch(
        [rollout.prompt_ids for rollout in chosen],
        [rollout.token_ids for rollout in chosen],
        policy.pad_id,
        policy.device,
        [rollout.logprobs for rollout in chosen],
    )
    with torch.no_grad():
        adapted = policy.token_stats(batch.input_ids, batch.mask, temperature).logprobs[batch.mask]
        with policy.without_adapter():
            base = policy.token_stats(batch.input_ids, batch.mask, temperature).logprobs[batch.mask]
    engine = batch.sampler_logprobs[batch.mask]
    effect = (adapted - base).abs().mean().item()
    gap, base_gap = (engine - adapted).abs().mean().item(), (engine - base).abs().mean().item()
    visible, rounding = (limits.get(str(policy.model.dtype), limits["16 bit"]) for limits in (VISIBLE, ROUNDING))
    weights = [tensor.abs().max().item() for name, tensor in policy.adapter_state().items() if "lora_B" in name]
    assert effect > 0 or max(weights) < UNTRAINED, (
        f"the adapter has weights of up to {max(weights):.3g} and changes no log-probability: it is not applied"
    )
    assert effect < visible or gap < base_gap, (
        f"the engine answers with the base model, not with the adapter: its log-probabilities are {base_gap:.3g} nats "
        f"from the base and {gap:.3g} from the adapted policy"
    )
    assert gap < rounding, (
        f"engine and trainer are {gap:.3g} nats apart on the engine's own completions, more than rounding ({rounding})"
    )
    return {"adapter_effect": effect, "engine_gap": gap}
