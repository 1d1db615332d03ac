"""Prompts that are computed once for all completions to them, against sequences that are computed one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl_bench.model import attention, sharing
from qerl_bench.model.attention import Kind
from qerl_bench.model.packing import Packing
from qerl_bench.model.sharing import why_not_shared
from qerl_bench.train.batch import MOST_READ, Batch, make_batch
from qerl_bench.train.data_parallel import rank_rows
from qerl_bench.train.update import make_optimizer, update

CPU = torch.device("cpu")
Group = tuple[int, int, list[int]]  # its prompt's number, its prompt's tokens, and those of its completions
# A prompt of one token, a group of one, a completion of one token and one of none, and a prompt that comes again.
GROUPS: list[Group] = [(1, 1, [4, 2]), (2, 6, [9, 1, 14]), (3, 5, [7]), (4, 3, [0, 2]), (2, 6, [3, 0])]


def _sequences(groups: Sequence[Group]) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and completions, those to one prompt not side by side."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        (turn, [10 * number + i for i in range(length)], torch.randint(0, 256, (tokens,), generator=generator).tolist())
        for number, length, completions in groups
        for turn, tokens in enumerate(completions)
    ]
    rows.sort(key=lambda row: row[0])
    return [prompt for _, prompt, _ in rows], [completion for *_, completion in rows]


def _batch(groups: Sequence[Group] = GROUPS, device: torch.device = CPU) -> Batch:
    prompts, completions = _sequences(groups)
    logprobs = [[-5.0] * len(completion) for completion in completions]
    advantages = torch.linspace(-1, 1, len(prompts)) * (torch.arange(len(prompts)) % 4 > 0)
    return make_batch(prompts, completions, 0, device, logprobs, advantages)


def _layouts(batch: Batch) -> tuple[Packing, Packing]:
    """Without and with shared prompts."""
    return Packing.from_mask(batch.mask), Packing.from_mask(batch.mask, batch.input_ids)


_groups = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.lists(st.integers(0, 5), min_size=1, max_size=4)),
    min_size=1,
    max_size=5,
)


# --- the layout ------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(groups=_groups)
def test_each_prompt_is_computed_once_and_each_sequence_has_it(groups: list[Group]) -> None:
    batch = _batch(groups)
    whole, shared = _layouts(batch)
    numbers = torch.arange(batch.mask.numel()).view(batch.mask.shape)
    prompts, completions = _sequences(groups)
    computed = {
        tuple(prompt): len(prompt) for prompt, completion in zip(prompts, completions, strict=True) if completion
    }
    count = sum(computed.values()) + sum(max(1, len(one)) if not one else len(one) for one in completions)
    assert len(shared.indices) == count and (shared.shared is None) == (count == len(whole.indices))
    assert torch.equal(shared.positions, shared.indices % batch.mask.shape[1])
    own = shared.pack(numbers)
    assert torch.equal(own[shared.places], whole.completion(numbers))
    ids = shared.pack(batch.input_ids)
    assert torch.equal(ids[shared.predictors], whole.pack(batch.input_ids)[whole.places - 1])
    assert torch.equal(whole.predictors, whole.places - 1)
    assert torch.equal(shared.unpack(ids), whole.unpack(whole.pack(batch.input_ids)))
    assert shared.longest == whole.longest and torch.equal(shared.scored, whole.scored)
    if shared.shared is not None:
        assert torch.equal(shared.shared.repeat(ids), whole.pack(batch.input_ids))
        assert torch.equal(shared.shared.offsets, whole.offsets)
        assert torch.equal(shared.shared.sources[shared.shared.own], torch.arange(count))


def test_gradients_of_copies_are_added_up_in_fp32() -> None:
    """Against PyTorch's own gradient; 300 ones are 300 in bfloat16, which counts no further than 256."""
    shared = _layouts(_batch())[1].shared
    assert shared is not None
    computed = torch.randn(len(shared.own), 2, 3, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(len(shared.sources), 2, 3, dtype=torch.float64)
    found, wanted = (
        torch.autograd.grad((copies * pull).sum(), computed)[0]
        for copies in (shared.repeat(computed), computed.index_select(0, shared.sources))
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
    many = _layouts(_batch([(1, 2, [1] * 300)]))[1].shared
    assert many is not None
    ones = torch.ones(302, 1, dtype=torch.bfloat16, requires_grad=True)
    many.repeat(ones).sum().backward()
    assert ones.grad is not None
    assert sorted(ones.grad.flatten().tolist()) == [1.0] * 300 + [300.0] * 2


# --- attention -------------------------------------------------------------------------------------------------------

KINDS = {
    "causal": Kind(0.3),
    "window": Kind(0.3, window=5),
    "softcap": Kind(0.3, softcap=1.5),
    "sinks": Kind(0.3, sinks=torch.tensor([-1.0, 0.5, 2.0, 0.0])),
}


def _outputs(
    backend: str,
    kind: Kind,
    *,
    shares: bool,
    groups: Sequence[Group] = GROUPS,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Output and gradients of query, key and value of the computed tokens, drawn in bfloat16, in FP32 on the host.

    Without `shares` the tokens of shared prompts are copied before, and of the outputs one copy counts.
    """
    batch = _batch(groups, torch.device(device))
    whole, shared = _layouts(batch)
    prompts = shared.shared
    assert prompts is not None
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, 16), (2, 16), (2, 16), (4, 16))
    drawn = [torch.randn(len(shared.indices), *size, generator=generator) for size in sizes]
    *leaves, pull = (x.bfloat16().to(device, dtype) for x in drawn)
    for leaf in leaves:
        leaf.requires_grad_()
    rows = leaves if shares else [leaf.index_select(0, prompts.sources) for leaf in leaves]
    width = batch.mask.shape[1]
    mask = None
    if kind.window is not None:
        mask = torch.ones(1, 1, width, width, dtype=torch.bool, device=device).tril().triu(1 - kind.window)
    query, key, value = (row.transpose(0, 1)[None] for row in rows)
    found = attention.BACKENDS[backend](query, key, value, mask, kind, shared if shares else whole)
    found = found if shares else found.index_select(0, prompts.own)
    gradients = torch.autograd.grad((found * pull).float().sum(), leaves)
    return [x.detach().float().cpu() for x in (found, *gradients)]


@pytest.mark.parametrize("backend", ["padded", "masked"])
@pytest.mark.parametrize("name", KINDS)
def test_attention_to_shared_prompts_is_that_to_copies(name: str, backend: str) -> None:
    found, wanted = _outputs(backend, KINDS[name], shares=True), _outputs("masked", KINDS[name], shares=False)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-6)


def _varlen(at_the_end: bool) -> Callable[..., torch.Tensor]:
    """PyTorch's function by SDPA; queries are the last of the keys, or else the first."""

    def varlen_attn(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, ends_k: torch.Tensor, most: int,
        most_k: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool,
    ) -> torch.Tensor:  # fmt: skip
        assert ends.dtype == ends_k.dtype == torch.int32 and window_size[1] == 0
        parts = []
        for row in range(len(ends) - 1):
            start, end, first, last = (int(x) for x in (ends[row], ends[row + 1], ends_k[row], ends_k[row + 1]))
            queries, keys = end - start, last - first
            assert 0 < queries <= keys <= most_k and queries <= most
            seen = torch.ones(keys, keys, dtype=torch.bool).tril()
            seen = seen if window_size[0] < 0 else seen.triu(-window_size[0])
            seen = seen[keys - queries :] if at_the_end else seen[:queries]
            one, key, value = (x[None].transpose(1, 2) for x in (q[start:end], k[first:last], v[first:last]))
            parts.append(attention._sdpa(one, key, value, seen[None, None], False, scale)[0].transpose(0, 1))
        return torch.cat(parts)

    return varlen_attn


@pytest.mark.parametrize("name", ["causal", "window"])
def test_flash_gets_whole_sequences_of_keys(name: str, flash: Callable[..., None]) -> None:
    flash(_varlen(at_the_end=True))
    found, wanted = _outputs("flash", KINDS[name], shares=True), _outputs("masked", KINDS[name], shares=False)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-6)


@pytest.mark.parametrize("at_the_end", [True, False])
def test_flash_that_aligns_at_the_beginning_is_found_out(at_the_end: bool, flash: Callable[..., None]) -> None:
    flash(_varlen(at_the_end))
    sharing._aligned_at_the_end.cache_clear()
    assert sharing._aligned_at_the_end(CPU) == at_the_end
    sharing._aligned_at_the_end.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", ["causal", "window"])
@pytest.mark.parametrize("groups", [GROUPS, [(1, 300, [200, 1, 150]), (2, 40, [400]), (3, 1, [5, 130])]])
def test_flash_on_a_gpu(name: str, groups: list[Group]) -> None:
    """Also where a window leaves out whole blocks of a prompt. Gradients of keys and values are the same to the bit."""
    if not attention.has_varlen(windows=name == "window"):
        pytest.skip("this PyTorch has no varlen attention of this kind")
    wanted = _outputs("masked", KINDS[name], shares=True, groups=groups)
    found, again = (
        _outputs("flash", KINDS[name], shares=True, groups=groups, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).norm() / other.norm()) < 0.02
        assert float((one - other).abs().max()) < 0.05 * float(other.abs().max())
    output, _, *of_keys = zip(found, again, strict=True)
    assert all(torch.equal(one, other) for one, other in (output, *of_keys))


# --- where it is done ------------------------------------------------------------------------------------------------


def test_a_cpu_computes_each_prompt_as_before(
    make_policy: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert not make_policy().shares_prompts
    assert "once a completion (the device is cpu)" in caplog.text
    decoder: Any = None
    assert why_not_shared(decoder, packing=False, experts=False) is not None
    assert why_not_shared(decoder, packing=True, experts=True) is not None


@pytest.mark.parametrize(("used", "shares"), [(("flash", "flash"), True), (("flash", "padded"), False)])
def test_all_layers_must_read_packed_sequences(
    used: tuple[str, str],
    shares: bool,
    make_policy: Callable[..., Any],
    stand_in: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a stand-in for a GPU, whose layers take these backends in turn."""
    decoder = make_policy().model.model
    names, computed = iter(used), sharing.packed_hidden
    stand_in(attention, packed_backend=lambda *_: next(names))
    monkeypatch.setitem(attention.BACKENDS, "flash", attention.masked)
    example = sharing._example(CPU)
    stand_in(sharing, _aligned_at_the_end=lambda device: True, _example=lambda device: example)
    stand_in(sharing, packed_hidden=lambda _, *rest: computed(decoder, *rest))
    on_gpu: Any = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda"))]))
    assert (why_not_shared(on_gpu, packing=True, experts=False) is None) == shares
    assert next(names, None) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_shares_in_16_bits(make_policy: Callable[..., Any]) -> None:
    """And computes the same as without, to what bfloat16 resolves."""
    assert not make_policy("model.dtype=float32", device="cuda").shares_prompts
    policy = make_policy("model.dtype=bfloat16", width=64, adapted=True, device="cuda")
    assert policy.shares_prompts
    (plain, gradients), (shared, others) = _computed(policy, _batch(device=policy.device))
    assert torch.allclose(plain, shared, rtol=0, atol=0.1)
    one, other = (torch.cat([x.flatten() for x in parts]) for parts in (gradients, others))
    assert float((one - other).norm() / one.norm()) < 0.05


# --- the policy ------------------------------------------------------------------------------------------------------


def _computed(policy: Any, batch: Batch) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Log-probabilities and gradients, without and with shared prompts."""
    policy.train_mode(True)
    found = []
    for layout in _layouts(batch):
        stats = policy.token_stats(batch.input_ids, batch.mask, 1.3, layout=layout)
        weights = torch.linspace(-1, 1, batch.mask.numel(), device=policy.device).view(batch.mask.shape)
        found.append((stats.logprobs.detach(), torch.autograd.grad((stats.logprobs * weights).sum(), policy.trainable)))
    policy.train_mode(False)
    return found


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("backend", ["padded", "masked"])
def test_log_probabilities_and_gradients_are_those_of_copies(
    make_policy: Callable[..., Any], backend: str, mode: str, attend: Callable[[str], None]
) -> None:
    policy, batch = make_policy(f"train.recompute={mode}", sharp=True, adapted=True), _batch()
    attend(backend)
    seen: list[int] = []
    handle = policy.model.model.layers[0].mlp.register_forward_hook(lambda *args: seen.append(args[1][0].shape[1]))
    (plain, gradients), (shared, others) = _computed(policy, batch)
    handle.remove()
    assert min(seen) == len(_layouts(batch)[1].indices) < max(seen) == len(_layouts(batch)[0].indices)
    torch.testing.assert_close(shared, plain, rtol=0, atol=2e-5)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4 * float(one.abs().max()) + 1e-7)
    assert max(float(gradient.abs().max()) for gradient in gradients) > 1e-3


# --- micro-batches ---------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(groups=_groups, tokens=st.integers(1, 40), left_out=st.sets(st.integers(0, 12)))
def test_micro_batches_count_what_is_computed(groups: list[Group], tokens: int, left_out: set[int]) -> None:
    batch = _batch(groups)
    selected = torch.tensor([row not in left_out for row in range(len(batch.lengths))])
    parts = [part.tolist() for part in batch.sharing_micro_batches(tokens, selected)]
    assert sorted(row for part in parts for row in part) == selected.nonzero()[:, 0].tolist()

    def fits(rows: list[int]) -> bool:
        part = batch.rows(torch.tensor(rows))
        empty = int((part.lengths - 1)[~part.mask.any(1)].sum())  # of which one token is computed, and all count
        computed = len(Packing.from_mask(part.mask, part.input_ids).indices) + empty
        return computed <= tokens and int(part.lengths.sum()) <= MOST_READ * tokens

    for number, part in enumerate(parts):
        assert len(part) == 1 or fits(part)
        assert number + 1 == len(parts) or not fits([*part, parts[number + 1][0]])
    prompts, completions = _sequences(groups)
    order = [tuple(prompts[row]) if completions[row] else row for part in parts for row in part]
    changes = sum(one != other for one, other in pairwise(order))
    assert changes == max(0, len({*order}) - 1)  # equal prompts side by side
    if parts:
        assert batch.lengths[parts[0][0]] == batch.lengths[selected].max()


def test_ranks_take_pieces_of_about_as_many_tokens() -> None:
    groups = [(number, 30, [40, 25, 31, 60, 55, 12, 44, 28]) for number in range(8)]
    batch = _batch(groups)
    taught = torch.arange(len(batch.lengths)) % 3 > 0
    for size in (1, 2, 3, 8):
        worlds: list[Any] = [SimpleNamespace(rank=rank, size=size) for rank in range(size)]
        rows = [rank_rows(batch, taught, world, shares_prompts=True) for world in worlds]
        assert torch.equal(torch.stack(rows).sum(0), torch.ones(len(taught), dtype=torch.long))
        for chosen in (taught, ~taught):
            computed = []
            for own in rows:
                part = batch.rows((own & chosen).nonzero()[:, 0])
                computed.append(len(Packing.from_mask(part.mask, part.input_ids).indices))
            assert max(computed) - min(computed) <= 100  # a completion and a prompt
        if size > 1:
            in_turn = [rank_rows(batch, taught, world, shares_prompts=False) for world in worlds]
            assert torch.equal(torch.stack(in_turn).sum(0), torch.ones(len(taught), dtype=torch.long))


@pytest.mark.parametrize("algo", ["grpo", "dapo", "gspo", "sft"])
def test_shared_prompts_change_no_update(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], algo: str
) -> None:
    """Metrics and AdamW's moments, whatever the micro-batches, with noise and a reference, in two updates a batch."""
    found, passes = [], []
    for tokens, shares in ((1000, False), (1000, True), (40, True), (25, True)):
        words = [f"algo={algo}", f"train.micro_batch_tokens={tokens}"]
        if algo != "sft":
            words += ["aqn=constant", "aqn.level=0.05", "noise.site=rollout_and_training"]
            words += ["kl.coef=0.1", "train.updates_per_batch=2"]
        experiment, policy = make_experiment("quant=nvfp4", *words), make_policy(*words[2:], adapted=True)
        policy.shares_prompts = shares
        with policy.noise.for_rollout(1, 0):  # draws what training repeats
            pass
        optimizer, no_run = make_optimizer(policy, experiment.optim), cast("Any", None)
        metrics = update(experiment, policy, optimizer, _batch(), no_run, 1)
        passes.append(metrics.pop("train/micro_batches"))
        moments = torch.cat([optimizer.state[one]["exp_avg"].flatten().double() for one in policy.trainable])
        found.append((metrics, moments))
    (metrics, moments), *others = found
    assert passes[0] == passes[1] < passes[2] < passes[3]
    for other, gradient in others:
        assert other == pytest.approx(metrics, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(gradient, moments, rtol=0, atol=1e-5 * float(moments.abs().max()) + 1e-9)
    assert float(moments.abs().max()) > 1e-4
