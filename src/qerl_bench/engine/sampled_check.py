"""What engine=hf writes, beside what the untouched model writes (`reference_generation.py`).

Two prompts, a short and a long one, are continued greedily and by given random numbers; the engine reads both at once.
Two continuations are equal if the log-probabilities that the engine reports of its tokens are those of the untouched
model, and its tokens are the same up to the first place where the untouched model's own numbers tie: two likeliest
tokens of one probability, or a random number at the border of two tokens. From there on the texts may differ, and are
not compared.

In FP32 this tries weights, caches, positions, padding and the draw, with errors a thousand times above rounding. In the
dtype and with the kernels of the run it is tried again, with the limits of rounding. Left out: vLLM's own sampling, of
which only the FP32 half is tried.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from qerl_bench.engine import hf_reference
from qerl_bench.engine.base import Completion, RolloutEngine, Sampling
from qerl_bench.engine.dequantized import operands_kept
from qerl_bench.engine.hf import HFEngine, request_key
from qerl_bench.engine.reference_generation import (
    TEMPERATURES,
    TOKENS,
    Written,
    refusing_model_errors,
    sampling_at,
    written_by_stock,
)
from qerl_bench.model.attention import CACHES
from qerl_bench.model.float32 import in_float32
from qerl_bench.model.policy import Policy
from qerl_bench.model.preflight import MAX_TOKEN_GAP, OWN_GAPS, instead_of, stock
from qerl_bench.model.reference_model import Origin, blocks_to_compare, first_blocks
from qerl_core.checks import ConfigError
from qerl_core.records import Prompt

FEW_TOKENS = 3
MAX_TIE = 5  # a token may be this many times as far off as the mean, in nats or in probability

Complete = Callable[[list[Prompt], Sampling], list[Completion]]


@dataclass(frozen=True)
class Gap:
    """How far a continuation of the engine is from the untouched model's, up to where their texts part."""

    of_tokens: list[float]  # nats, |difference| of log-probabilities
    tie: float  # how far from a tie the place is where they part; 0 if they do not


def sampled_check(policy: Policy, engine: RolloutEngine, source: Origin, where: str) -> dict[str, Any]:
    """The gaps, as plain data. Raises ConfigError, which names the model `where`, if the engine writes something else.
    None for a model whose logits are not finite, since sampling will say which weight makes them so.

    Needs a policy that computes what its base does: a fresh adapter, whose B is 0, or none. Draws nothing from the
    run's random numbers and leaves no trace.
    """
    count = blocks_to_compare(policy)
    # Whether the engine computes in FP32 itself.
    in_one = policy.model.dtype == torch.float32 and isinstance(engine, HFEngine) and not engine.tf32
    devices = [policy.device] if policy.device.type == "cuda" else []
    results: dict[str, Any] = {"sampled_blocks": count or len(policy.structure.blocks)}
    with torch.random.fork_rng(devices), torch.no_grad(), first_blocks(policy, count):
        written = written_by_stock(policy, source, count, where)
        if any(bool(one.logprobs.isnan().any()) for one in written):
            return {}
        limit = MAX_TOKEN_GAP["torch.float32"]
        if not in_one:
            with in_float32(policy), operands_kept(policy.model):
                completed = _completed(written, _reference(policy), policy, where)
            results["sampled_gap_float32"] = _require_equal(written, completed, limit, policy, where)
        if isinstance(engine, HFEngine):
            try:
                completed = _completed(written, _as_it_runs(engine), policy, where)
            finally:
                engine.close()  # forgets what it has recorded
                engine.sleep()
            if not in_one:
                limit = MAX_TOKEN_GAP["16 bit"]
                if _mean(written, completed) > limit:
                    limit = max(limit, OWN_GAPS * _own_gap(policy, written))
            results["sampled_gap"] = _require_equal(written, completed, limit, policy, where, as_it_runs=not in_one)
    if devices:
        torch.cuda.empty_cache()
    return results


# --- the engine's side -----------------------------------------------------------------------------------------------


def _completed(written: Sequence[Written], complete: Complete, policy: Policy, where: str) -> list[Completion]:
    """The completions of `written`, in its order, by calls of `complete` with all prompts of one temperature."""
    found: dict[int, Completion] = {}
    with refusing_model_errors(f"engine=hf cannot continue a text with {where}", _cache_words(policy)):
        for temperature in TEMPERATURES:
            places = [place for place, one in enumerate(written) if one.temperature == temperature]
            prompts = [written[place].prompt for place in places]
            found |= zip(places, complete(prompts, sampling_at(temperature)), strict=True)
    return [found[place] for place in range(len(written))]


def _reference(policy: Policy) -> Complete:
    """By the modules of transformers, as engine=hf calls them where it records nothing."""

    def complete(prompts: list[Prompt], sampling: Sampling) -> list[Completion]:
        keys = [request_key(sampling, prompt, 0) for prompt in prompts]
        return hf_reference.decode(policy, list(map(policy.ids_of, prompts)), sampling, keys, [TOKENS] * len(prompts))

    return complete


def _as_it_runs(engine: HFEngine) -> Complete:
    """By the engine itself; a few tokens where it runs the same modules as in FP32."""
    same = engine.sampler is None and engine.policy.model.dtype != torch.float32
    tokens = FEW_TOKENS if same else TOKENS

    def complete(prompts: list[Prompt], sampling: Sampling) -> list[Completion]:
        rollouts = engine.generate([replace(prompt, new_tokens=(tokens,)) for prompt in prompts], sampling)
        return [(one.token_ids, one.logprobs, one.entropies) for one in rollouts]

    return complete


def _cache_words(policy: Policy) -> str:
    """That the model takes no cache from engine=hf, if so."""
    taken = inspect.signature(policy.model.forward).parameters
    if any(name in taken for name in CACHES):
        return ""
    return f"Its forward pass takes none of {', '.join(CACHES)}, which engine=hf hands on. "


# --- the comparison --------------------------------------------------------------------------------------------------


def gap_of(written: Written, completion: Completion) -> Gap:
    """How far a completion of the engine is from what was written."""
    ids, logprobs, _ = completion
    gaps: list[float] = []
    for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        gap = abs(logprob - written.logprobs[place, token].item())
        gaps.append(gap if gap == gap else torch.inf)
        if token != written.ids[place]:
            return Gap(gaps, _from_tie(written, place, token))
    return Gap(gaps, 0.0)


def _from_tie(written: Written, place: int, token: int) -> float:
    """How far the untouched model is from having `token` at this place too: nats below its likeliest one, or the
    probability between the random number and the token's own part of [0, 1)."""
    logprobs = written.logprobs[place].double()
    if written.temperature == 0:
        return (logprobs.max() - logprobs[token]).item()
    ends = logprobs.exp().cumsum(0)
    end, number = (ends[token] / ends[-1]).item(), written.numbers[place].item()
    begin = end - (logprobs[token].exp() / ends[-1]).item()
    return max(begin - number, number - end, 0.0)


def _mean(written: Sequence[Written], found: Sequence[Completion]) -> float:
    gaps = [nats for one, ours in zip(written, found, strict=True) for nats in gap_of(one, ours).of_tokens]
    return sum(gaps) / len(gaps)


def _require_equal(
    written: Sequence[Written],
    found: Sequence[Completion],
    limit: float,
    policy: Policy,
    where: str,
    as_it_runs: bool = False,
) -> float:
    """The mean gap in nats. Raises ConfigError if it is above `limit`, or if texts part where nothing ties."""
    mean, gaps = _mean(written, found), [gap_of(one, ours) for one, ours in zip(written, found, strict=True)]
    tie, most = max(gap.tie for gap in gaps), MAX_TIE * limit
    if mean <= limit and tie <= most:
        return mean
    largest = ", ".join(f"{max(gap.of_tokens):.2g} {one}" for one, gap in zip(written, gaps, strict=True))
    at_first, later = max(gap.of_tokens[0] for gap in gaps), max(max(gap.of_tokens[1:], default=0.0) for gap in gaps)
    reason = ""
    if mean <= limit:
        reason = "Its log-probabilities are right, and the tokens it chooses are not. "
    elif at_first <= most < later:
        reason = f"Each first token is right: what the model keeps of earlier ones is not. {_cache_words(policy)}"
    dtype, remedy = (policy.model.dtype, "kernel=torch") if as_it_runs else (torch.float32, instead_of(policy))
    raise ConfigError(
        f"engine=hf does not write what {where} writes with transformers' generate: in {dtype} the log-probabilities "
        f"of its tokens are {mean:.3g} nats off on average (limit {limit:.2g}), at most {largest}, and the texts part "
        f"{tie:.2g} from a tie (limit {most:.2g}). {reason}Use {remedy}"
    )


def _own_gap(policy: Policy, written: Sequence[Written]) -> float:
    """The mean gap of transformers' own modules in the dtype of the run, on what was written."""
    gaps: list[float] = []
    with stock(policy):
        for one in written:
            ids = torch.tensor([[*policy.ids_of(one.prompt), *one.ids]], device=policy.device)
            logits = policy.model(input_ids=ids, use_cache=False).logits[0, -TOKENS - 1 : -1]
            chosen = torch.tensor(one.ids, device=policy.device)[:, None]
            ours = torch.log_softmax(logits.float(), -1)
            gaps += (ours - one.logprobs).gather(1, chosen)[:, 0].abs().tolist()
    return sum(gaps) / len(gaps)
