"""Checks that an engine samples with the trained adapter, not with the base model.

Some published numbers of adapters were those of the base model, because the engine had not applied the adapter. So
every evaluation checks completions that the engine wrote, and engine=vllm also checks prompts after each
synchronization.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qerl_core.checks import require
from qerl_core.process.out_of_memory import whole_or_halves
from qerl_core.process.progress import phase
from qerl_core.records import Rollout

if TYPE_CHECKING:
    import torch

    from qerl_bench.model.policy import Policy
    from qerl_bench.train.batch import Batch

PROBE_COMPLETIONS = 16
PROBE_PROMPTS = 4
PROBE_TOKENS = 128  # of each prompt at most
# By dtype of the model, nats. A mean effect of the adapter below VISIBLE may be hidden by rounding.
VISIBLE = {"torch.float32": 1e-3, "16 bit": 0.05}
# Largest mean |engine - trainer| on completions that rounding can explain. Where keys and values are rounded, those of
# 16 bits hold in FP32 too: a last bit can move a code by one step, and a GPU's kernels differ in last bits.
MAX_COMPLETION_GAP = {"torch.float32": 1e-3, "16 bit": 0.2}
# The same on prompts, at temperature 1. Different kernels round differently: by 1e-6 to 1e-5 in FP32, by 0.01 to 0.1 in
# 16 bits, and by more where logits are large.
MAX_PROMPT_GAP = {"torch.float32": 1e-4, "16 bit": 0.2}
UNTRAINED = 1e-4  # an adapter whose B has no larger weight may have no effect


def check_completions(policy: Policy, rollouts: list[Rollout], temperature: float = 1.0) -> dict[str, float]:
    """Mean absolute log-probability gaps, at `temperature`, on a few completions that the engine wrote.

    `adapter_effect`: trainer with its adapter against trainer without it; 0 before training. `engine_gap`: engine
    against trainer with its adapter; only rounding. Empty without an adapter. Raises AssertionError if

    - the adapter has weights but no effect: the trainer itself does not apply it;
    - the adapter has a visible effect and the engine is closer to the base model;
    - engine and trainer differ by more than rounding: the engine runs a different model.
    """
    if policy.adapter is None:
        return {}
    from qerl_bench.train.batch import make_batch

    chosen = rollouts[:PROBE_COMPLETIONS]
    batch = make_batch(
        [rollout.prompt_ids for rollout in chosen],
        [rollout.token_ids for rollout in chosen],
        policy.pad_id,
        policy.device,
        [rollout.logprobs for rollout in chosen],
    )
    weights = [tensor.abs().max().item() for name, tensor in policy.adapter_state().items() if "lora_B" in name]
    adds = any(weights) or policy.base_scales or policy.merging is not None  # else the base is the same to the bit
    with phase("comparing sampler and trainer"):
        adapted = base = _trainer_logprobs(policy, batch, temperature)
        if adds:
            with policy.without_adapter():
                base = _trainer_logprobs(policy, batch, temperature)
    engine = batch.sampler_logprobs[batch.mask]
    effect, gap, base_gap = _mean_gap(adapted, base), _mean_gap(engine, adapted), _mean_gap(engine, base)
    visible, max_gap = _limit(VISIBLE, policy), _limit(MAX_COMPLETION_GAP, policy)
    assert effect > 0 or max(weights) < UNTRAINED, (
        f"the adapter has weights of up to {max(weights):.3g} and changes no log-probability: it is not applied"
    )
    assert effect < visible or gap < base_gap, (
        f"the engine answers with the base model, not with the adapter: its log-probabilities are {base_gap:.3g} nats "
        f"from the base and {gap:.3g} from the adapted policy"
    )
    assert gap < max_gap, (
        f"engine and trainer are {gap:.3g} nats apart on the engine's own completions, more than rounding ({max_gap})"
    )
    return {"adapter_effect": effect, "engine_gap": gap}


def probe_prompts(prompts: list[list[int]]) -> list[list[int]]:
    """The beginnings of a few prompts (token ids) for `check_prompts`. Raises ConfigError if none has two tokens."""
    chosen = [ids[:PROBE_TOKENS] for ids in prompts if len(ids) > 1][:PROBE_PROMPTS]
    require(bool(chosen), "cannot compare vLLM with the trainer: every prompt has a single token")
    return chosen


def check_prompts(
    policy: Policy, prompts: list[list[int]], engine: torch.Tensor, engine_base: torch.Tensor
) -> dict[str, float]:
    """The metrics `sync/*` but the number of norms, from log-probabilities of all prompt tokens but the first.

    `engine` and `engine_base` are those of the engine with and without its adapter, one prompt after the other. Raises
    AssertionError if engine and trainer are too far apart.
    """
    from qerl_bench.train.batch import make_batch

    batch = make_batch([ids[:1] for ids in prompts], [ids[1:] for ids in prompts], policy.pad_id, policy.device)
    trainer = _trainer_logprobs(policy, batch, 1.0).cpu().double()
    assert policy.adapter is not None
    with policy.adapter.disable_adapter():  # keeps the trained norm scales, which the engine has too
        trainer_base = _trainer_logprobs(policy, batch, 1.0).cpu().double()
    engine, engine_base = engine.double(), engine_base.double()
    gaps = {
        "sync/adapter_effect": _mean_gap(trainer, trainer_base),
        "sync/adapter_effect_engine": _mean_gap(engine, engine_base),
        "sync/gap": _mean_gap(engine, trainer),
        "sync/gap_base": _mean_gap(engine_base, trainer_base),
    }
    limit = _limit(MAX_PROMPT_GAP, policy)
    for name in ("sync/gap", "sync/gap_base"):
        assert gaps[name] <= limit, f"vLLM does not compute what is trained: {name} is over {limit} nats, {gaps}"
    assert gaps["sync/adapter_effect"] == 0 or gaps["sync/adapter_effect_engine"] > 0, (
        f"vLLM answers with the base model: the adapter changes nothing there, {gaps}"
    )
    return gaps


def _trainer_logprobs(policy: Policy, batch: Batch, temperature: float) -> torch.Tensor:
    """Log-probabilities of all completion tokens in the trainer's forward pass, one row after the other."""
    import torch

    def of_rows(rows: Sequence[int]) -> list[torch.Tensor]:
        part = batch if len(rows) == len(batch.mask) else batch.rows(torch.tensor(rows, device=batch.mask.device))
        with torch.no_grad():
            logprobs = policy.token_stats(part.input_ids, part.mask, temperature).logprobs
        return [row[mask] for row, mask in zip(logprobs, part.mask, strict=True)]

    return torch.cat(whole_or_halves(of_rows, range(len(batch.mask))))


def _mean_gap(left: torch.Tensor, right: torch.Tensor) -> float:
    return (left - right).abs().mean().item()


def _limit(limits: dict[str, float], policy: Policy) -> float:
    dtype = "16 bit" if policy.kv.kinds.rounds else str(policy.model.dtype)
    return limits.get(dtype, limits["16 bit"])
