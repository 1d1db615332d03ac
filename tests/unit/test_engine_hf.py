"""Sampling: what is drawn, what is said about it, and that neither depends on what else is in the batch."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from qerl_bench.engine.base import Sampling, require_room
from qerl_bench.engine.hf import HF, HFEngine, request_key
from qerl_bench.engine.hf_reference import decode
from qerl_bench.model import keys_values
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.train.batch import make_batch
from qerl_core.checks import ConfigError
from qerl_core.records import Prompt, Rollout
from qerl_kernels.sampling import draw, uniforms

QUESTIONS = (
    "7+5=?",
    "1",
    "a much longer question, of which a byte tokenizer makes one token for each letter: 12+34-5=?",
    "19-3+4=?",
    "",
)
SAMPLES = 4


def _prompts(questions: tuple[str, ...] = QUESTIONS) -> list[Prompt]:
    return [
        Prompt(id=f"test/{i}", messages=({"role": "user", "content": question},), answer="0")
        for i, question in enumerate(questions)
    ]


def _sampling(**changed: Any) -> Sampling:
    return Sampling(**{"samples": SAMPLES, "temperature": 1.0, "max_tokens": 24, "seed": 11, **changed})


@pytest.fixture(scope="module")
def policy(make_policy: Callable[..., Any]) -> Any:
    """Stops at one token in twelve, so that rows end at different times."""
    policy = make_policy(sharp=True, adapted=True)
    policy.stop_ids = frozenset({*policy.stop_ids, *range(3, 262, 12)})
    return policy


@pytest.fixture(scope="module")
def rollouts(policy: Any) -> list[Rollout]:
    return HFEngine(policy, max_num_seqs=256).generate(_prompts(), _sampling())


def _same(left: list[Rollout], right: list[Rollout]) -> None:
    assert [(r.prompt.id, r.sample) for r in left] == [(r.prompt.id, r.sample) for r in right]
    for a, b in zip(left, right, strict=True):
        assert (a.prompt_ids, a.token_ids, a.text, a.finished) == (b.prompt_ids, b.token_ids, b.text, b.finished)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
        assert a.entropies == pytest.approx(b.entropies, abs=1e-5)


# --- batching --------------------------------------------------------------------------------------------------------


def test_the_batch_under_test_is_ragged_in_every_way(
    policy: Any, rollouts: list[Rollout], listen: Callable[..., Any]
) -> None:
    """The comparisons below mean something only if prompts and completions differ in length and rows leave early."""
    assert {len(r.prompt_ids) for r in rollouts} >= {1, 2, 6}
    lengths = [len(r.token_ids) for r in rollouts]
    assert min(lengths) < 5 and max(lengths) == 24 and len(set(lengths)) > 6
    assert {r.finished for r in rollouts} == {True, False}
    reordered = listen(DynamicCache, "reorder_cache")
    _same(HFEngine(policy, max_num_seqs=256).generate(_prompts(), _sampling()), rollouts)
    repeated, *kept = [len(indices) for _, indices in reordered]
    assert repeated == len(rollouts)
    assert len(kept) >= 2 and kept == sorted(kept, reverse=True) and kept[0] <= len(rollouts) // 2


@pytest.mark.parametrize("max_num_seqs", [1, 3, 4, 9])
def test_rounds_of_any_size_give_the_same_completions(policy: Any, rollouts: list[Rollout], max_num_seqs: int) -> None:
    _same(HFEngine(policy, max_num_seqs).generate(_prompts(), _sampling()), rollouts)


def test_each_prompt_alone_gives_the_same_completions(policy: Any, rollouts: list[Rollout]) -> None:
    engine = HFEngine(policy, max_num_seqs=256)
    _same([r for prompt in _prompts() for r in engine.generate([prompt], _sampling())], rollouts)
    backwards = engine.generate(_prompts()[::-1], _sampling())
    _same([r for i in range(len(QUESTIONS))[::-1] for r in backwards[i * SAMPLES : (i + 1) * SAMPLES]], rollouts)


def test_each_sample_alone_gives_the_same_completion(policy: Any, rollouts: list[Rollout]) -> None:
    sampling = _sampling()
    for rollout in rollouts:
        key = request_key(sampling, rollout.prompt, rollout.sample)
        with torch.inference_mode():
            [(ids, logprobs, entropies)] = decode(policy, [rollout.prompt_ids], sampling, [key])
        assert ids == rollout.token_ids
        assert logprobs == pytest.approx(rollout.logprobs, abs=1e-5)
        assert entropies == pytest.approx(rollout.entropies, abs=1e-5)


def test_more_samples_or_tokens_extend_what_was_drawn(policy: Any, rollouts: list[Rollout]) -> None:
    fewer = HFEngine(policy, max_num_seqs=256).generate(_prompts(), _sampling(samples=2, max_tokens=10))
    for short in fewer:
        [long] = [r for r in rollouts if (r.prompt.id, r.sample) == (short.prompt.id, short.sample)]
        assert short.token_ids == long.token_ids[:10]
        assert short.finished == (long.finished and len(long.token_ids) <= 10)


def test_completions_differ_between_samples_prompts_and_seeds(policy: Any, rollouts: list[Rollout]) -> None:
    assert len({tuple(r.token_ids) for r in rollouts}) > 0.9 * len(rollouts)
    other = HFEngine(policy, max_num_seqs=256).generate(_prompts(), _sampling(seed=12))
    assert sum(a.token_ids == b.token_ids for a, b in zip(other, rollouts, strict=True)) <= 1


@pytest.mark.parametrize("max_num_seqs", [1, 3, 4, 6])
def test_no_more_than_max_batch_sequences_run_side_by_side(policy: Any, max_num_seqs: int) -> None:
    sizes: list[int] = []

    def count(_model: object, _given: object, inputs: dict[str, Any]) -> None:
        sizes.append(len(inputs["input_ids"]))

    with policy.model.register_forward_pre_hook(count, with_kwargs=True):
        HFEngine(policy, max_num_seqs).generate(_prompts(), _sampling(max_tokens=3))
    assert max(sizes) <= max_num_seqs


def test_no_prompts_no_rollouts(policy: Any) -> None:
    assert HFEngine(policy, max_num_seqs=4).generate([], _sampling()) == []


def test_prompts_that_leave_no_room_are_refused_before_anything_is_sampled(
    policy: Any, stand_in: Callable[..., None]
) -> None:
    """One token a byte and one for the line feed: 3, 8 and 5 tokens of prompt, 24 of completion."""
    prompts = _prompts(("1+", "1+2+3+4", "1+23"))
    stand_in(policy.model.config, max_position_embeddings=32)
    assert len(HFEngine(policy, max_num_seqs=4).generate(prompts, _sampling())) == 3 * SAMPLES
    stand_in(policy.model.config, max_position_embeddings=28)
    stand_in(policy.model, forward=None)
    with pytest.raises(ConfigError) as refusal:
        HFEngine(policy, max_num_seqs=4).generate(prompts, _sampling())
    assert re.match(r"2 of 3 prompts do not fit: .* 28 tokens, .* has 8, .* may have 24; ", str(refusal.value))
    require_room(policy, prompts[::2], _sampling(max_tokens=22), max_model_len=27)
    with pytest.raises(
        ConfigError, match=r"1 of 2 prompts do not fit: engine\.max_model_len allows 26 tokens.* larger"
    ):
        require_room(policy, prompts[::2], _sampling(max_tokens=22), max_model_len=26)


# --- what is said about the tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("noisy", [False, True])
def test_logprobs_and_entropies_against_one_full_forward_pass(
    policy: Any, temperature: float, noisy: bool, make_noise: Any
) -> None:
    """No cache, no left padding, no compaction: the trainer's own pass over the finished sequences."""
    with make_noise(policy.norms, 0.05 if noisy else 0.0).for_rollout(1, 0):
        rollouts = HFEngine(policy, max_num_seqs=256).generate(_prompts(), _sampling(temperature=temperature))
        batch = make_batch(
            [r.prompt_ids for r in rollouts],
            [r.token_ids for r in rollouts],
            policy.pad_id,
            policy.device,
            [r.logprobs for r in rollouts],
        )
        with torch.no_grad():
            stats = policy.token_stats(batch.input_ids, batch.mask, temperature)
            other = policy.token_stats(batch.input_ids, batch.mask, 1.7 - temperature)
    assert torch.allclose(stats.logprobs, batch.sampler_logprobs, rtol=0, atol=1e-4)
    assert not torch.allclose(other.logprobs, batch.sampler_logprobs, rtol=0, atol=1e-1)
    entropies = torch.tensor([entropy for r in rollouts for entropy in r.entropies])
    assert torch.allclose(stats.entropy[batch.mask], entropies, rtol=0, atol=1e-4)


def test_greedy_is_the_argmax_of_plain_forward_passes(policy: Any) -> None:
    rollouts = HFEngine(policy, max_num_seqs=256).generate(
        _prompts(), _sampling(samples=1, temperature=0.0, max_tokens=8)
    )
    for rollout in rollouts:
        ids = list(rollout.prompt_ids)
        for token, logprob in zip(rollout.token_ids, rollout.logprobs, strict=True):
            with torch.no_grad():
                row = policy.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float().log_softmax(-1)
            assert token == row.argmax().item()
            assert logprob == pytest.approx(row.max().item(), abs=1e-4)  # at temperature 1
            ids.append(token)


def test_greedy_does_not_depend_on_the_seed(policy: Any) -> None:
    engine = HFEngine(policy, max_num_seqs=256)
    first, second = (engine.generate(_prompts(), _sampling(samples=2, temperature=0.0, seed=seed)) for seed in (1, 2))
    _same(first, second)
    assert all(a.token_ids == b.token_ids for a, b in zip(first[::2], first[1::2], strict=True))


def test_stop_token_and_truncation(policy: Any, rollouts: list[Rollout]) -> None:
    for rollout in rollouts:
        *body, last = rollout.token_ids
        assert not policy.stop_ids.intersection(body)
        assert rollout.finished == (last in policy.stop_ids)
        assert rollout.finished or len(rollout.token_ids) == 24
        assert rollout.text == policy.tokenizer.decode(body if rollout.finished else rollout.token_ids)
        assert len(rollout.token_ids) == len(rollout.logprobs) == len(rollout.entropies)
        assert all(logprob <= 0 for logprob in rollout.logprobs) and all(entropy >= 0 for entropy in rollout.entropies)


def test_a_stop_token_in_the_last_place_counts_as_finished(policy: Any, rollouts: list[Rollout]) -> None:
    rollout = next(r for r in rollouts if r.finished and len(r.token_ids) > 2)
    length = len(rollout.token_ids)
    for limit, finished in ((length, True), (length - 1, False)):
        again = HFEngine(policy, 256).generate([rollout.prompt], _sampling(max_tokens=limit))[rollout.sample]
        assert again.finished is finished
        assert again.token_ids == rollout.token_ids[:limit]


def test_a_single_token(policy: Any) -> None:
    rollouts = HFEngine(policy, max_num_seqs=256).generate(_prompts(), _sampling(max_tokens=1))
    assert all(len(r.token_ids) == 1 for r in rollouts)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_no_cache_outlives_a_call(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[weakref.ref[Any]] = []

    class Watched(DynamicCache):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            caches.append(weakref.ref(self))

    monkeypatch.setattr(keys_values, "DynamicCache", Watched)
    engine = HFEngine(policy, max_num_seqs=8)
    rollouts = engine.generate(_prompts(), _sampling())
    gc.collect()
    assert len(caches) == 3 and not any(cache() for cache in caches)
    assert len(rollouts) == len(QUESTIONS) * SAMPLES
    engine.close()


def test_a_cpu_rebuilds_packed_weights_once_in_a_call(
    make_policy: Callable[..., Any], listen: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once a token, which changes no bit; and none of them is kept afterwards."""
    packed_policy = make_policy(quant="nvfp4", sharp=True, adapted=True)
    layers = [module for module in packed_policy.model.modules() if isinstance(module, PackedLinear)]
    rebuilt = listen(PackedLinear, "operand")
    engine = HFEngine(packed_policy, max_num_seqs=8)
    rollouts = engine.generate(_prompts(), _sampling())
    assert len(rebuilt) == len(layers) == len({*rebuilt}) and all(layer._kept is None for layer in layers)
    monkeypatch.setattr("qerl_bench.engine.dequantized.operands_kept", lambda model: nullcontext())
    again = engine.generate(_prompts(), _sampling())
    assert len(rebuilt) > 20 * len(layers)
    assert [(r.token_ids, r.logprobs) for r in rollouts] == [(r.token_ids, r.logprobs) for r in again]


def test_sampling_leaves_the_model_ready_for_training(policy: Any) -> None:
    """No inference-mode tensor may stay behind in the model: the next backward pass would fail."""
    HFEngine(policy, max_num_seqs=256).generate(_prompts(), _sampling(max_tokens=2))
    batch = make_batch([[1, 2, 3]], [[4, 5]], policy.pad_id, policy.device)
    policy.token_stats(batch.input_ids, batch.mask, 1.0).logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in policy.trainable)
    policy.model.zero_grad(set_to_none=True)


# --- drawing ---------------------------------------------------------------------------------------------------------

LOGITS = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 2.0, 0.0, -4.0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampling_frequencies(temperature: float) -> None:
    """Chi-square with 7 degrees of freedom stays below 24.3 with probability 0.999; the seed is fixed."""
    count = 20_000
    uniform = torch.from_numpy(np.random.default_rng(0).random(count))
    token, logprob, entropy = draw(LOGITS.expand(count, -1), temperature, uniform)
    probability = (LOGITS.double() / temperature).softmax(-1)
    observed = torch.bincount(token, minlength=8).double()
    assert ((observed - count * probability).square() / (count * probability)).sum() < 24.3
    assert torch.allclose(logprob.double(), probability.log()[token], rtol=0, atol=1e-6)
    assert torch.allclose(entropy.double(), -(probability * probability.log()).sum().expand(count), rtol=0, atol=1e-6)


def test_the_inverse_cdf_is_exact() -> None:
    """Evenly spaced numbers fall into the steps of the distribution function, one per n-th of the unit interval."""
    count = 100_000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    token, _, _ = draw(LOGITS.expand(count, -1), 1.0, uniform)
    assert (token.diff() >= 0).all()
    expected = LOGITS.double().softmax(-1) * count
    assert (torch.bincount(token, minlength=8) - expected).abs().max() < 1.1


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.62, 0.65, 0.9, 0.999, 1.0])
def test_top_p_keeps_the_fewest_likeliest_tokens(top_p: float) -> None:
    """Against a loop over the tokens from the likeliest down; what is drawn keeps its share among those kept."""
    probability = LOGITS.double().softmax(-1).tolist()
    kept, mass = set(), 0.0
    for token in sorted(range(8), key=lambda i: -probability[i]):
        if mass < top_p:
            kept.add(token)
            mass += probability[token]
    count = 100_000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    token, logprob, entropy = draw(LOGITS.expand(count, -1), 1.0, uniform, top_p)
    expected = [probability[i] / mass * count if i in kept else 0 for i in range(8)]
    assert set(token.tolist()) == kept
    assert (torch.bincount(token, minlength=8) - torch.tensor(expected)).abs().max() < 1.1
    whole = draw(LOGITS.expand(count, -1), 1.0, uniform)
    assert torch.equal(entropy, whole[2])  # what is reported is of all tokens
    assert torch.allclose(logprob.double(), torch.tensor(probability).double().log()[token], atol=1e-6)
    assert torch.equal(token, whole[0]) == (top_p == 1.0)


def test_top_p_keeps_every_token_as_likely_as_the_last_one() -> None:
    """Probabilities 0.4 and six times 0.1: which of the equal ones cross 0.55 must not depend on their order."""
    uniform = torch.linspace(0, JUST_UNDER_1, 1000, dtype=torch.float64)
    logits = torch.tensor([0.1, 0.1, 0.1, 0.4, 0.1, 0.1, 0.1]).log().expand(1000, -1)
    assert set(draw(logits, 1.0, uniform, 0.55)[0].tolist()) == set(range(7))
    assert set(draw(logits, 1.0, uniform, 0.35)[0].tolist()) == {3}


def test_the_engine_honours_top_p(policy: Any) -> None:
    """With next to nothing kept, sampling is greedy."""
    engine = HFEngine(policy, max_num_seqs=256)
    narrow = engine.generate(_prompts(), _sampling(top_p=1e-6))
    greedy = engine.generate(_prompts(), _sampling(temperature=0.0))
    assert [r.token_ids for r in narrow] == [r.token_ids for r in greedy]


JUST_UNDER_1 = 1 - 2.0**-53  # the largest number that a generator of doubles in [0, 1) returns


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, JUST_UNDER_1])
@pytest.mark.parametrize("width", [3, 262, 5_000])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(uniform: float, width: int) -> None:
    """Tokens of probability 0 at either end of the vocabulary are never drawn, however the sum rounds."""
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(500, width, generator=generator)
    logits[:, [0, -1]] = -1e4  # underflows to probability 0
    token, logprob, entropy = draw(logits, 1.0, torch.full((500,), uniform, dtype=torch.float64))
    assert (token == (1 if uniform < 0.5 else width - 2)).all()
    assert (logprob > -100).all() and entropy.isfinite().all()


def test_a_certain_token_is_always_drawn() -> None:
    logits = torch.full((3, 7), -1e4)
    logits[:, 4] = 50.0
    token, logprob, entropy = draw(logits, 1.0, torch.tensor([0.0, 0.5, JUST_UNDER_1], dtype=torch.float64))
    assert token.tolist() == [4, 4, 4]
    assert logprob.tolist() == [0.0] * 3 and entropy.tolist() == [0.0] * 3


def test_impossible_tokens_have_no_part_in_the_entropy() -> None:
    """A model that masks unused vocabulary with -inf: 0 log 0 = 0, not NaN."""
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    for temperature in (0.0, 1.0):
        token, logprob, entropy = draw(logits, temperature, torch.tensor([0.9], dtype=torch.float64))
        assert token.item() == (1 if temperature else 0)
        assert logprob.item() == pytest.approx(-np.log(2), abs=1e-6)
        assert entropy.item() == pytest.approx(np.log(2), abs=1e-6)


def test_uniform_numbers_belong_to_their_request() -> None:
    def numbers_of(prompt_id: str, sample: int, count: int = 1000, seed: int = 11) -> np.ndarray:
        return uniforms(
            [request_key(_sampling(seed=seed), Prompt(id=prompt_id, messages=(), answer=""), sample)], count
        )[0]

    numbers = numbers_of("p", 0)
    assert numbers.shape == (1000,) and numbers.dtype == np.float64
    assert numbers.min() >= 0 and numbers.max() < 1 and abs(numbers.mean() - 0.5) < 5 * 12**-0.5 / 1000**0.5
    assert (numbers == numbers_of("p", 0)).all()
    assert (numbers[:10] == numbers_of("p", 0, count=10)).all()
    others = [numbers_of("p", 1), numbers_of("q", 0), numbers_of("p", 0, seed=12)]
    assert all((numbers != other).mean() > 0.99 for other in others)


def test_tf32_holds_while_it_samples(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(HFEngine, "_generate", lambda *_: seen.append(torch.get_float32_matmul_precision()) or [])
    before = torch.get_float32_matmul_precision()
    for on in (False, True):
        engine = HFEngine(policy, 3)
        engine.tf32 = on  # which a CPU has not
        engine.generate(_prompts(), _sampling())
        assert torch.get_float32_matmul_precision() == before
    assert seen == [before, "high"]


def test_the_spec(policy: Any) -> None:
    options = {"cache_gib": None, "dequantized_gib": 2.5, "kept_gib": 1.5, "prefill_tokens": 100, "invariant": True}
    built = HF(name="hf", max_num_seqs=3, tf32=True, **options).build(policy)
    assert isinstance(built, HFEngine)
    assert vars(built.limits) == {"rows": 3, "page_share": 1.0, **options}
    said = built.record()
    assert (said["max_num_seqs"], said["invariant"], said["tf32"]) == (3, True, False)  # this is a CPU
    assert said["kernels"] == policy.kernels and set(said["kernels"].values()) == {"torch"}
    wrong = {"max_num_seqs": (0, -1, 2.5, True, None), "cache_gib": (0, "4"), "kept_gib": (-1, None), "invariant": (1,)}
    options["tf32"] = False
    for name, values in (wrong | {"prefill_tokens": (0, None), "dequantized_gib": (-1, None, "all")}).items():
        for value in values:
            with pytest.raises(ConfigError, match=name):
                HF(**{"name": "hf", "max_num_seqs": 3, **options, name: value})
