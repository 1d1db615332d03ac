"""What engine=hf writes, beside what the untouched model writes with transformers' own `generate`.

Two prompts, a short and a long one, are continued greedily and by given random numbers. `generate` reads each prompt
alone, in FP32, without packing, kernels or adapter (`model/stock.py`); the engine reads both at once. Two continuations
are equal if the log-probabilities that the engine reports of its tokens are those of the untouched model, and its
tokens are the same up to the first place where the untouched model's own numbers tie: two likeliest tokens of one
probability, or a random number at the border of two tokens. From there on the texts may differ, and are not compared.

In FP32 this tries weights, caches, positions, padding and the draw, with errors a thousand times above rounding. In the
dtype and with the kernels of the run it is tried again, with the limits of rounding. Left out: vLLM's own sampling.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from qerl_bench.checks import ConfigError, require
from qerl_bench.engine import hf_reference
from qerl_bench.engine.base import Completion, RolloutEngine, Sampling
from qerl_bench.engine.hf import HFEngine, request_key
from qerl_bench.model.context import longest_context
from qerl_bench.model.float32 import in_float32
from qerl_bench.model.lm_head import decoder_of
from qerl_bench.model.policy import Policy
from qerl_bench.model.preflight import MAX_TOKEN_GAP, OWN_GAPS, stock
from qerl_bench.model.stock import Source, blocks_to_compare, first_blocks, stock_model
from qerl_bench.model.structure import probe_ids
from qerl_bench.process.gpu_share import release
from qerl_bench.process.memory import shortage
from qerl_bench.records import Prompt
from qerl_kernels.sampling import draw, uniforms

log = logging.getLogger(__name__)
TOKENS = 12  # of each continuation
SHORT, LONG = 5, 80  # tokens of the prompts
LONGEST_WINDOW = 1024  # tokens: the long prompt ends just before the end of a window up to here
SEED = 0  # of the prompts' tokens and of the draws
MAX_TIE = 5  # a tie may be this many times as far from one as the mean log-probability may be off
CACHE = "past_key_values"  # what engine=hf hands to the model


@dataclass(frozen=True)
class Written:
    """A continuation of `prompt` by the untouched model."""

    prompt: Prompt
    temperature: float
    ids: list[int]
    logprobs: torch.Tensor  # (TOKENS, V)
    numbers: torch.Tensor  # (TOKENS,) of the draw


@dataclass(frozen=True)
class Gap:
    """How far a continuation of the engine is from the untouched model's, up to where their texts part."""

    of_tokens: list[float]  # nats, |difference| of log-probabilities
    tie: float  # how far from a tie the place is where they part; 0 if they do not


def sampled_check(policy: Policy, engine: RolloutEngine, source: Source, where: str) -> dict[str, Any]:
    """The gaps, as plain data. Raises ConfigError, which names the model `where`, if the engine writes something else.

    Needs a fresh adapter, whose B is 0. Draws nothing from the run's random numbers and leaves no trace.
    """
    count = blocks_to_compare(policy)
    devices = [policy.device] if policy.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad(), first_blocks(policy, count):
        written = written_by_stock(policy, source, count, where)
        results: dict[str, Any] = {"sampled_blocks": len(decoder_of(policy.model).layers) if count else None}
        sampled = policy.model.dtype == torch.float32 and isinstance(engine, HFEngine)
        if not sampled:
            with in_float32(policy):
                found = _reference(policy, written, where)
            results["sampled_gap_float32"] = _compare(written, found, MAX_TOKEN_GAP["torch.float32"], policy, where)
        if isinstance(engine, HFEngine):
            found = _of_engine(engine, written, where)
            key = "torch.float32" if sampled else "16 bit"
            limit = MAX_TOKEN_GAP[key]
            if not sampled and _mean(written, found) > limit:
                limit = max(limit, OWN_GAPS * _own_gap(policy, written))
            results["sampled_gap"] = _compare(written, found, limit, policy, where, as_it_runs=not sampled)
    if devices:
        torch.cuda.empty_cache()
    return results


# --- the untouched model ---------------------------------------------------------------------------------------------


def written_by_stock(policy: Policy, source: Source, count: int | None, where: str) -> list[Written]:
    """A greedy and a drawn continuation of each prompt."""
    model = stock_model(policy, source, count, where)
    try:
        return [written for prompt in prompts_of(policy) for written in _continued(model, prompt, where)]
    finally:
        del model
        release()


def prompts_of(policy: Policy) -> list[Prompt]:
    """The short and the long prompt, which fit into the context."""
    context = longest_context(policy.model) or torch.inf
    windows = [getattr(layer, "sliding_window", None) for layer in hf_reference.cache_of(policy).layers]
    crossing = [window - TOKENS // 2 for window in windows if window and LONG < window <= LONGEST_WINDOW]
    ordinary = probe_ids(policy.model, 256)
    generator, prompts = torch.Generator().manual_seed(SEED), []
    for length in (SHORT, max([LONG, *crossing])):
        chosen = torch.randint(len(ordinary), (int(min(length, context - TOKENS)),), generator=generator)
        ids = ordinary[chosen.to(policy.device)].tolist()
        prompts.append(
            Prompt(id=f"preflight/{length}", messages=(), answer="", token_ids=tuple(ids), new_tokens=(TOKENS,))
        )
    return prompts


def _continued(model: PreTrainedModel, prompt: Prompt, where: str) -> list[Written]:
    assert prompt.token_ids is not None
    ids = torch.tensor([prompt.token_ids] * 2, device=model.device)
    numbers = torch.from_numpy(uniforms([request_key(_sampling(1.0), prompt, 0)], TOKENS)).to(model.device)  # (1, T)
    said: Any = _or_refused(
        f"transformers cannot continue a text with {where}",
        lambda: model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=GenerationConfig(
                max_new_tokens=TOKENS, do_sample=False, return_dict_in_generate=True, output_logits=True
            ),
            logits_processor=LogitsProcessorList([_GivenDraws(ids.shape[1], numbers)]),
        ),
    )
    new, logits = said.sequences[:, ids.shape[1] :], torch.stack(said.logits, 1)
    logprobs = torch.log_softmax(logits.float(), -1)  # (2, T, V)
    return [
        Written(prompt, temperature, new[row].tolist(), logprobs[row], numbers[0])
        for row, temperature in enumerate((0.0, 1.0))
    ]


class _GivenDraws(LogitsProcessor):
    """Leaves the first row to `generate`, which takes its likeliest token, and draws the token of the second."""

    def __init__(self, prompt_tokens: int, numbers: torch.Tensor) -> None:
        self.prompt_tokens, self.numbers = prompt_tokens, numbers

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        token, *_ = draw(scores[1:], 1.0, self.numbers[:, input_ids.shape[1] - self.prompt_tokens])
        return torch.cat([scores[:1], torch.full_like(scores[1:], -torch.inf).scatter(1, token[:, None], 0.0)])


# --- the engine ------------------------------------------------------------------------------------------------------


def _sampling(temperature: float) -> Sampling:
    return Sampling(samples=1, temperature=temperature, max_tokens=TOKENS, seed=SEED)


def _by_temperature(written: Sequence[Written], complete: Any) -> list[Completion]:
    """The completions of `written`, in its order, by calls of `complete` with all prompts of a temperature."""
    found: dict[int, Completion] = {}
    for temperature in (0.0, 1.0):
        places = [place for place, one in enumerate(written) if one.temperature == temperature]
        prompts = [written[place].prompt for place in places]
        found |= zip(places, complete(prompts, _sampling(temperature)), strict=True)
    return [found[place] for place in range(len(written))]


def _reference(policy: Policy, written: Sequence[Written], where: str) -> list[Completion]:
    """By transformers' modules as engine=hf calls them."""

    def complete(prompts: list[Prompt], sampling: Sampling) -> list[Completion]:
        keys = [request_key(sampling, prompt, 0) for prompt in prompts]
        ids = [list(prompt.token_ids or ()) for prompt in prompts]
        return hf_reference.decode(policy, ids, sampling, keys, [TOKENS] * len(prompts))

    return _or_refused(
        f"engine=hf cannot continue a text with {where}", lambda: _by_temperature(written, complete), policy
    )


def _of_engine(engine: HFEngine, written: Sequence[Written], where: str) -> list[Completion]:
    """By the engine itself, which then forgets what it has recorded."""

    def complete(prompts: list[Prompt], sampling: Sampling) -> list[Completion]:
        rollouts = engine.generate(prompts, sampling)
        return [(one.token_ids, one.logprobs, one.entropies) for one in rollouts]

    try:
        return _or_refused(
            f"engine=hf cannot continue a text with {where}", lambda: _by_temperature(written, complete), engine.policy
        )
    finally:
        engine.close()
        engine.sleep()


def _or_refused(failed: str, call: Any, policy: Policy | None = None) -> Any:
    """What `call` returns. What a foreign model raises is a ConfigError; a shortage of memory is not its fault."""
    try:
        return call()
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        if shortage(error):
            raise
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ConfigError(
            f"{failed}: {reason} ({type(error).__name__}). {_cache_words(policy)}Use another model"
        ) from error


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
    """How far the untouched model is from having `token` there too: nats below its likeliest one, or the probability
    between the random number and the token's own part of [0, 1)."""
    logprobs = written.logprobs[place]
    if written.temperature == 0:
        return (logprobs.max() - logprobs[token]).item()
    ends = logprobs.double().exp().cumsum(0)
    end, number = (ends[token] / ends[-1]).item(), written.numbers[place].item()
    begin = end - (logprobs[token].double().exp() / ends[-1]).item()
    return max(begin - number, number - end, 0.0)


def _mean(written: Sequence[Written], found: Sequence[Completion]) -> float:
    gaps = [gap for one, ours in zip(written, found, strict=True) for gap in gap_of(one, ours).of_tokens]
    return sum(gaps) / len(gaps)


def _compare(
    written: Sequence[Written],
    found: Sequence[Completion],
    limit: float,
    policy: Policy,
    where: str,
    as_it_runs: bool = False,
) -> float:
    """The mean gap in nats. Raises ConfigError if it is above `limit`, or if texts part where nothing ties."""
    gaps = [gap_of(one, ours) for one, ours in zip(written, found, strict=True)]
    mean, tie = _mean(written, found), max(gap.tie for gap in gaps)
    if mean <= limit and tie <= MAX_TIE * limit:
        return mean
    first = [gap.of_tokens[0] for gap in gaps]
    after = [nats for gap in gaps for nats in gap.of_tokens[1:]]
    kinds = {
        "greedy": max(max(gap.of_tokens) for one, gap in zip(written, gaps, strict=True) if one.temperature == 0),
        "drawn": max(max(gap.of_tokens) for one, gap in zip(written, gaps, strict=True) if one.temperature > 0),
    } | {
        f"after {len(one.prompt.token_ids or ())} tokens": max(gap.of_tokens)
        for one, gap in zip(written, gaps, strict=True)
    }
    words = ", ".join(f"{kind} {nats:.2g}" for kind, nats in kinds.items())
    reason = ""
    if mean <= limit:
        reason = "Its log-probabilities are right and its choice of tokens is not. "
    elif max(first) <= MAX_TIE * limit < max(after, default=0.0):
        reason = f"The first token is right: what it keeps of earlier tokens is not. {_cache_words(policy)}"
    raise ConfigError(
        f"engine=hf does not write what {where} writes with transformers' generate: in {_dtype(policy, as_it_runs)} the "
        f"log-probabilities of its tokens are {mean:.3g} nats off on average (limit {limit:.2g}), at most {words}; the "
        f"texts part {tie:.2g} from a tie (limit {MAX_TIE * limit:.2g}). {reason}Use "
        f"{'kernel=torch' if as_it_runs else 'another model'}"
    )


def _dtype(policy: Policy, as_it_runs: bool) -> str:
    return str(policy.model.dtype if as_it_runs else torch.float32)


def _cache_words(policy: Policy | None) -> str:
    """The name under which the model wants its cache, if that is another than engine=hf's."""
    if policy is None:
        return ""
    names = inspect.signature(policy.model.forward).parameters
    others = [name for name in names if name in ("cache_params", "state", "mems")]
    return "" if CACHE in names else f"It takes {', '.join(others) or 'none'} where others take {CACHE}. "


def _own_gap(policy: Policy, written: Sequence[Written]) -> float:
    """The mean gap of transformers' own modules in the dtype of the run, on what was written."""
    gaps: list[float] = []
    with stock(policy):
        for one in written:
            ids = torch.tensor([[*(one.prompt.token_ids or ()), *one.ids]], device=policy.device)
            logits = policy.model(input_ids=ids, use_cache=False).logits[0, -TOKENS - 1 : -1]
            chosen = torch.tensor(one.ids, device=policy.device)[:, None]
            ours = torch.log_softmax(logits.float(), -1)
            gaps += (ours - one.logprobs).gather(1, chosen)[:, 0].abs().tolist()
    return sum(gaps) / len(gaps)
