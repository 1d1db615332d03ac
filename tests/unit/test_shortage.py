"""A run that meets a shortage of memory goes on in smaller pieces, with the numbers of one that had them before."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_bench.engine import adapter_check, decode_buffers, hf, hf_graph, hf_reference
from qerl_bench.engine.base import Sampling, WrappedEngine, innermost
from qerl_bench.engine.rollout_queue import Limits
from qerl_bench.engine.sampler import Sampler
from qerl_bench.engine.shared import SharedEngine
from qerl_bench.model.policy import Policy
from qerl_bench.parallel import World
from qerl_bench.quant.kv_kinds import Kinds
from qerl_bench.train import memory_plan, recorded_passes, reduced_sizes
from qerl_bench.train import update as module
from qerl_bench.train.batch import make_batch
from qerl_bench.train.recorded_passes import PaddedInputs, RecordedPasses, least_tokens, rows_that_fit
from qerl_bench.train.reduced_sizes import Size
from qerl_bench.train.retry_smaller import repeated_smaller
from qerl_bench.train.trainer_state import TrainerState
from qerl_core.checks import TrainingStopped
from qerl_core.process import gpu_share
from qerl_core.process.device import random_state, set_random_state
from qerl_core.process.out_of_memory import NO_MEMORY, held_unused, memory_for
from qerl_core.records import Prompt
from tests.failing import failing, shortages

LENGTHS = (4, 1, 9, 7, 6, 3, 12)  # with prompts up to 14 tokens


class Run:
    """A run directory as far as `memory_plan` uses it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    @property
    def stored(self) -> dict[str, Any]:
        return json.loads((self.path / memory_plan.FILE).read_text())


@pytest.fixture
def run(tmp_path: Path) -> Any:
    return Run(tmp_path)


def _batch(policy: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    rows = [
        [torch.randint(0, 256, (n,), generator=generator).tolist() for n in sizes]
        for sizes in ((2, 3, 1, 5, 8, 4, 2), LENGTHS)
    ]
    advantages = torch.tensor([1.0, -0.5, 0.25, 2.0, -1.5, 0.5, 0.75])
    return make_batch(*rows, policy.pad_id, policy.device, [[-5.0] * length for length in LENGTHS], advantages)


def _updated(
    policy: Any, experiment: Any, run: Any, steps: int = 1, state: TrainerState | None = None
) -> tuple[list[dict[str, float]], torch.Tensor]:
    """The metrics of each step, and the weights behind the last."""
    torch.manual_seed(3)
    optimizer, state = module.make_optimizer(policy, experiment.optim), state or TrainerState()
    of_step = partial(module.update, experiment, policy, optimizer, _batch(policy), run, state=state)
    found = [of_step(step + 1) for step in range(steps)]
    return found, torch.cat([parameter.detach().flatten() for parameter in policy.trainable])


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("lora.dropout=0.5",), ("kl.coef=0.1", "importance_sampling.mode=truncate")])
@pytest.mark.parametrize("failing", [(1,), (2,), (2, 4)])
def test_an_update_that_ran_out_of_memory_is_that_of_smaller_micro_batches(
    make_policy: Callable[..., Any],
    make_experiment: Callable[..., Any],
    run: Any,
    caplog: pytest.LogCaptureFixture,
    words: tuple[str, ...],
    failing: tuple[int, ...],
) -> None:
    """No gradient is lost or counted twice, and dropout draws the same: equal bit for bit."""
    tokens = 80 // 2 ** len(failing)
    wanted = _updated(make_policy(*words), make_experiment(*words, f"train.micro_batch_tokens={tokens}"), None, 2)
    policy, experiment = make_policy(*words), make_experiment(*words, "train.micro_batch_tokens=80")
    with shortages(policy, "token_stats", *failing):
        found = _updated(policy, experiment, run, 2)
    assert found[0] == wanted[0] and torch.equal(found[1], wanted[1])
    assert run.stored == {"shortage": {"step": 1, "until": 11, "tokens": tokens, "recorded": False}}
    assert caplog.text.count("no memory is left (Tried to allocate 2.00 GiB)") == len(failing)


UNUSED = (  # as an H200 said it of a run that shared it with six others; its kernels had been given 13.85 GiB
    "CUDA out of memory. Tried to allocate 204.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 41.22 GiB is "
    "free. Including non-PyTorch memory, this process has 19.62 GiB memory in use. 18.97 GiB allowed; Of the allocated "
    "memory 13.85 GiB is allocated by PyTorch, and {} is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def _unused(held: str = "4.94 GiB") -> Exception:
    return torch.OutOfMemoryError(UNUSED.format(held))


@pytest.mark.parametrize(
    ("held", "calls", "tokens", "repeated"),
    [("4.94 GiB", (2,), 80, [1]), ("4.94 GiB", (2, 4), 40, [1]), ("203.9 MiB", (2,), 40, None)],
)
def test_an_update_whose_memory_was_held_unused_is_repeated_once_as_it_was(
    make_policy: Callable[..., Any],
    make_experiment: Callable[..., Any],
    run: Any,
    held: str,
    calls: tuple[int, ...],
    tokens: int,
    repeated: list[int] | None,
) -> None:
    """With the numbers of a run without a shortage, even where no other size is allowed; then in smaller ones."""
    exact = f"parallel.exact={str(tokens == 80).lower()}"
    wanted = _updated(make_policy(), make_experiment(f"train.micro_batch_tokens={tokens}"), None, 2)
    policy, experiment = make_policy(), make_experiment("train.micro_batch_tokens=80", exact)
    with failing(policy, "token_stats", _unused(held), calls, midway=True):
        found = _updated(policy, experiment, run, 2)
    assert found[0] == wanted[0] and torch.equal(found[1], wanted[1])
    assert run.stored.get("repeated") == repeated and ("shortage" in run.stored) == (tokens == 40)


def test_steps_are_made_smaller_where_repeats_do_not_help(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], run: Any
) -> None:
    """Short in steps 1, 3 and 4: two are repeated as they were, from the third on micro-batches are halved."""
    policy, experiment = make_policy(), make_experiment("train.micro_batch_tokens=80")
    optimizer, made, state = module.make_optimizer(policy, experiment.optim), [], TrainerState()
    for step in range(1, 6):
        with failing(policy, "token_stats", _unused(), [1] if step in (1, 3, 4) else [], midway=True):
            metrics = module.update(experiment, policy, optimizer, _batch(policy), run, step, state=state)
        made.append(int(metrics["train/micro_batches"]))
        kept, state = state.shortages.state(), TrainerState()  # as a continued run
        state.shortages.restore(kept)
    assert made[0] == made[1] == made[2] < made[3] == made[4]
    assert run.stored["repeated"] == [1, 3] and run.stored["shortage"]["step"] == 4


def test_recordings_go_before_an_update_is_repeated_as_it_was(make_experiment: Callable[..., Any], run: Any) -> None:
    """What is held unused may lie in their pools."""
    state, cut, attempts = TrainerState(), [], []
    state.shortages.begin(1)

    def work() -> int:
        attempts.append(len(cut))
        if len(attempts) < 3:
            raise _unused()
        return 7

    size = Size(80, recorded=True)
    found = repeated_smaller(work, size, cut.append, make_experiment(), "cpu", run, 14, state, World())
    assert found == (Size(80, recorded=False), 7) and cut == 2 * [Size(80, recorded=False)]
    assert run.stored["repeated"] == [1] and run.stored["shortage"]["tokens"] == 80


@pytest.mark.parametrize("unit", ["bytes", "KiB", "MiB", "GiB", "TiB"])
def test_what_was_held_is_compared_with_what_was_wanted(unit: str) -> None:
    said = "Tried to allocate 2.00 {}. 1.00 GiB is allocated by PyTorch, with 1 bytes in private pools, and {} {}"
    behind = "is reserved by PyTorch but unallocated."
    known = unit != "TiB"
    assert held_unused(f"{said.format(unit, '2.00', unit)} {behind}") == known
    assert not held_unused(f"{said.format(unit, '1.99', unit)} {behind}")
    assert not held_unused(said.format(unit, "2.00", unit))


def test_what_sampling_keeps_is_given_up_for_an_update(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], run: Any
) -> None:
    """Also if a micro-batch is a single sequence already, which then ends the run the second time only."""
    for tokens, short in ((80, (1,)), (14, (1,)), (14, (1, 2))):
        policy = make_policy()
        engine = hf.HFEngine(policy, 4, kept_gib=1.0)
        engine.sampler = Sampler(policy, engine.limits)
        engine.generate(PROMPTS, SAMPLING)
        engine.sleep()
        assert engine.sampler.kept is not None and engine.holds_memory
        experiment, state = make_experiment(f"train.micro_batch_tokens={tokens}"), TrainerState()
        ends = pytest.raises(TrainingStopped, match="up to 14 tokens") if len(short) > 1 else nullcontext()
        with shortages(policy, "token_stats", *short), state.joined_by(engine), ends:
            _updated(policy, experiment, run, state=state)
        assert engine.sampler.kept is None and not engine.holds_memory and state.engines == []


def test_a_later_update_on_the_same_batch_goes_on_with_what_the_first_has_fixed(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], run: Any
) -> None:
    words = ("train.updates_per_batch=3", "kl.coef=0.1", "importance_sampling.mode=truncate", "optim.lr=1e-2")
    results = []
    for tokens, short in ((40, ()), (80, (6,))):  # 2 micro-batches and their reference, then 2 in the second update
        policy, experiment = make_policy(*words), make_experiment(*words, f"train.micro_batch_tokens={tokens}")
        with shortages(policy, "token_stats", *short) as calls:
            results.append(_updated(policy, experiment, run))
        assert len(calls) > 8
    ((wanted,), weights), ((found,), others) = results
    assert run.stored["shortage"]["tokens"] == 40
    for one in (wanted, found):
        one.pop("train/micro_batches")  # those of the first update
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(others, weights, rtol=0, atol=1e-3)  # Adam's sign where a gradient is next to 0


def test_a_continued_run_has_the_micro_batches_that_it_came_to(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], run: Any
) -> None:
    experiment = make_experiment("train.micro_batch_tokens=80")
    run.write(memory_plan.FILE, json.dumps({"micro_batch_tokens": 20, "recorded": False}))
    found, _ = _updated(make_policy(), experiment, run, state=TrainerState(size=memory_plan.planned_before(run)))
    wanted, _ = _updated(make_policy(), make_experiment("train.micro_batch_tokens=20"), None)
    assert found == wanted and found[0]["train/micro_batches"] > 3


@pytest.mark.parametrize("tokens", ["null", "80"])
def test_one_sequence_that_does_not_fit_ends_the_run_in_words(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], run: Any, tokens: str
) -> None:
    experiment = make_experiment(f"train.micro_batch_tokens={tokens}", "train.recompute=selective")
    said = r"2.00 GiB.* up to 14 tokens.*recompute=selective.* has 14\. .*same command.*recompute=full.*max_completion"
    policy = make_policy()
    with shortages(policy, "token_stats", *range(1, 99)), pytest.raises(TrainingStopped, match=said):
        _updated(policy, experiment, run)


def test_a_run_that_is_to_be_exact_on_several_gpus_keeps_its_micro_batches(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], run: Any
) -> None:
    policy, experiment = make_policy(), make_experiment("train.micro_batch_tokens=80", "parallel.exact=true")
    with (
        shortages(policy, "token_stats", 1),
        pytest.raises(TrainingStopped, match=r"a smaller train\.micro_batch_tokens, at least 14"),
    ):
        _updated(policy, experiment, run)


def test_other_errors_are_not_repeated(make_policy: Callable[..., Any], make_experiment: Callable[..., Any]) -> None:
    policy, calls = make_policy(), []
    policy.token_stats = lambda *_: calls.append(1) or torch.zeros(2) @ torch.zeros(3)
    with pytest.raises(RuntimeError, match="size"):
        _updated(policy, make_experiment(), None)
    assert calls == [1]


def test_a_shortage_in_the_sum_of_gradients_ends_the_run(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], run: Any
) -> None:
    """Only one rank may have it, so no rank repeats the update, although the message quotes the allocator."""
    with (
        failing(module.GradientSum, "add", RuntimeError("CUDA error: out of memory")) as calls,
        pytest.raises(TrainingStopped, match=r"^train: no memory is left .*out of memory"),
    ):
        _updated(make_policy(), make_experiment("train.micro_batch_tokens=80"), run)
    assert calls == [1]


def test_ranks_repeat_an_update_if_one_of_them_can_free_what_sampling_keeps(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], run: Any
) -> None:
    class Other(World):
        """Another rank, which says yes."""

        def gather(self, value: Any) -> list[Any]:
            return [value, True] if value is False else [value]

    policy, experiment = make_policy(), make_experiment("train.micro_batch_tokens=14")
    optimizer = module.make_optimizer(policy, experiment.optim)
    with shortages(policy, "token_stats", 1) as calls:
        module.update(experiment, policy, optimizer, _batch(policy), run, 1, Other())
    assert len(calls) > 2


def test_what_was_planned_is_tried_again_after_some_steps(
    make_policy: Callable[..., Any],
    make_experiment: Callable[..., Any],
    run: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two steps after the first shortage, four after the second, eight after the third, in the middle of these."""
    caplog.set_level("INFO", logger="qerl_bench")
    monkeypatch.setattr(reduced_sizes, "FIRST_WAIT", 2)
    policy, experiment = make_policy(), make_experiment("train.micro_batch_tokens=80")
    optimizer, made, state = module.make_optimizer(policy, experiment.optim), [], TrainerState()
    for step in range(1, 17):
        with shortages(policy, "token_stats", *([1] if step in (1, 4, 7) else [])):
            metrics = module.update(experiment, policy, optimizer, _batch(policy), run, step, state=state)
        made.append(int(metrics["train/micro_batches"]))
    whole, half, quarter = made[-1], made[0], made[6]
    assert whole < half < quarter
    assert made == [half] * 3 + [half] * 3 + [quarter] * 9 + [whole]
    told = [line for line in caplog.text.splitlines() if "as planned again" in line]
    assert len(told) == 2 and "step 16: micro-batches" in told[1] and "9 steps after" in told[1]
    assert run.stored["shortage"] | {"tokens": 20} == {"step": 7, "until": 15, "tokens": 20, "recorded": False}


def test_a_checkpoint_keeps_what_shortages_have_come_to() -> None:
    kept, again = reduced_sizes.Shortages(step=3), reduced_sizes.Shortages()
    kept.size.shrink({"tokens": 40, "recorded": False}, 3)
    kept.limits.shrink({"rows": 4}, 2)
    kept.limits.shrink({"rows": 2}, 3)
    again.restore(json.loads(json.dumps(kept.state())))
    assert (again.size, again.limits) == (kept.size, kept.limits) and again.limits.last == 23
    again.restore(None)
    assert again == reduced_sizes.Shortages()


def test_ranks_agree_about_the_latest_shortage() -> None:
    limits = [
        reduced_sizes.Reduced({"rows": rows}, step, wait) for rows, step, wait in ((8, 3, 10), (2, 5, 20), (4, 5, 10))
    ]

    class Three(World):
        def gather(self, value: Any) -> list[Any]:
            return limits

    for own in limits:
        found = reduced_sizes.Shortages(limits=own)
        found.agree(Three())
        assert found.limits == limits[1]


def test_random_numbers_go_back() -> None:
    state = random_state("cpu")
    first = torch.rand(3)
    set_random_state(state)
    assert torch.equal(torch.rand(3), first)


# --- recorded passes -------------------------------------------------------------------------------------------------


def test_padded_micro_batches_stay_within_their_tokens() -> None:
    for tokens, width in ((8192, 1100), (8192, 100), (1024, 7), (40, 14), (30_000, 3)):
        rows = rows_that_fit(tokens, width)
        assert recorded_passes.bucket(rows) == rows and (rows * recorded_passes.bucket(width) <= tokens or rows == 4)
        assert recorded_passes.bucket(rows + 1) * recorded_passes.bucket(width) > tokens
    assert least_tokens(1100) == 4 * 1280


class Replayed:
    """In the place of a graph: computes again, into the same places."""

    def __init__(self, passes: RecordedPasses, place: PaddedInputs, outputs: Any) -> None:
        self.passes, self.place, self.outputs = passes, place, outputs

    def replay(self) -> None:
        found = self.passes.compute(self.place)
        with torch.no_grad():
            torch._foreach_copy_(self.outputs.tensors(), found.tensors())  # pyright: ignore[reportPrivateImportUsage]


def _recording(passes: RecordedPasses, *failing: int) -> list[tuple[int, ...]]:
    """Let `passes` record on a CPU; these recordings fail. Returns the shapes of all, as they are asked for."""
    asked: list[tuple[int, ...]] = []

    def record(inputs: PaddedInputs) -> None:
        asked.append(inputs.shape)
        place = PaddedInputs(inputs.rows, inputs.width, {name: x.clone() for name, x in inputs.tensors.items()})
        found, recordings = passes.compute(place), passes.recordings
        if len(asked) in failing:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        if recordings.gradients is None:
            recordings.gradients = [None if x is None else torch.empty_like(x) for x in found.gradients]
        outputs = found.places(recordings.gradients)
        recordings.passes[inputs.shape] = place, Replayed(passes, place, outputs), outputs  # type: ignore[assignment]

    passes.records, passes._record = True, record
    return asked


def test_recordings_share_what_they_give(make_policy: Callable[..., Any], make_experiment: Callable[..., Any]) -> None:
    experiment, plain = make_experiment("train.micro_batch_tokens=60"), make_policy()
    wanted, weights = _updated(plain, experiment, None, 2)
    policy = make_policy()
    passes = RecordedPasses(experiment, policy)
    shapes = _recording(passes)
    found, others = _updated(policy, experiment, None, 2, TrainerState(passes=passes))
    assert len(shapes) == len({*shapes}) > 1  # and those of the second step are replayed
    for one in (*wanted, *found):
        one.pop("train/micro_batches")
    assert found[0] == pytest.approx(wanted[0], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(others, weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("failing", [1, 2])
def test_passes_are_plain_from_then_on_where_a_recording_has_no_memory(
    make_policy: Callable[..., Any],
    make_experiment: Callable[..., Any],
    run: Any,
    caplog: pytest.LogCaptureFixture,
    failing: int,
) -> None:
    """The update is that of a run without recordings, bit for bit; nothing is recorded later."""
    experiment = make_experiment("train.micro_batch_tokens=60")
    wanted = _updated(make_policy(), experiment, None, 2)
    policy = make_policy()
    passes = RecordedPasses(experiment, policy)
    shapes = _recording(passes, failing)
    found = _updated(policy, experiment, run, 2, TrainerState(passes=passes))
    assert found[0] == wanted[0] and torch.equal(found[1], wanted[1])
    assert len(shapes) == failing and not passes.recordings.passes
    assert (
        run.stored["shortage"] == {"step": 1, "until": 11, "tokens": 60, "recorded": False}
        and caplog.text.count("no memory is left") == 1
    )


def test_a_recording_that_says_something_else_when_it_breaks_off_is_a_shortage_too(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any]
) -> None:
    passes = RecordedPasses(make_experiment(), make_policy())

    def record(inputs: PaddedInputs) -> None:
        try:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    passes.records, passes._record = True, record
    batch = _batch(passes.policy)
    with pytest.raises(torch.OutOfMemoryError):
        passes(PaddedInputs.of(batch, torch.ones(7), 0))


def test_a_recording_can_free_those_before_it(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any]
) -> None:
    """When a larger pool takes their place, nobody else holds them."""
    passes = RecordedPasses(make_experiment(), make_policy())
    inputs = PaddedInputs.of(_batch(passes.policy), torch.ones(7), 0)
    place = PaddedInputs(7, 14, {})
    passes.recordings.passes[1, 2, 3] = place, Replayed(passes, place, None), None  # type: ignore[assignment]
    graph = weakref.ref(passes.recordings.passes[1, 2, 3][1])

    def record(_: PaddedInputs) -> None:
        passes.release()
        assert graph() is None
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    passes.records, passes._record = True, record
    with pytest.raises(torch.OutOfMemoryError):
        passes(inputs)


# --- sampling and evaluation -----------------------------------------------------------------------------------------

QUESTIONS = ("7+5=?", "1", "one token for each letter of a longer question: 12+34-5=?", "19-3+4=?")
PROMPTS = [
    Prompt(id=str(i), messages=({"role": "user", "content": question},), answer="")
    for i, question in enumerate(QUESTIONS)
]
SAMPLING = Sampling(samples=4, temperature=1.0, max_tokens=40, seed=11)


@pytest.fixture(scope="module")
def policy(make_policy: Callable[..., Policy]) -> Policy:
    """Stops at one token in twelve."""
    made = make_policy("model.heads=4", "model.kv_heads=2", sharp=True, adapted=True)
    made.stop_ids = frozenset({*made.stop_ids, *range(3, 262, 12)})
    return made


def _engine(policy: Policy, queue: bool, rows: int = 16, **options: Any) -> hf.HFEngine:
    engine = hf.HFEngine(policy, rows, **options)
    engine.sampler = Sampler(policy, engine.limits) if queue else None
    return engine


def _same(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one.prompt.id, one.sample, one.token_ids) == (other.prompt.id, other.sample, other.token_ids)
        assert one.logprobs == pytest.approx(other.logprobs, abs=5e-5)


PLACES = {  # where memory runs out: of the queue, and of the reference
    "a step": (True, hf_graph.Decoding, "_advance", 20),
    "reading a prompt": (True, hf_graph.Decoding, "_read", 1),
    "keys and values": (True, decode_buffers, "_memory", 3),
    "the reference": (False, hf_reference, "prefill", 1),
    "a later chunk": (False, hf_reference, "to_completions", 2),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("invariant", [False, True])
def test_completions_are_the_same_with_fewer_rows(
    policy: Policy, caplog: pytest.LogCaptureFixture, place: str, invariant: bool
) -> None:
    queue, owner, name, call = PLACES[place]
    wanted = _engine(policy, queue, 8, invariant=invariant).generate(PROMPTS, SAMPLING)
    engine = _engine(policy, queue, 8, invariant=invariant)
    with shortages(owner, name, call, call + 1) as calls:
        _same(engine.generate(PROMPTS, SAMPLING), wanted)
    assert len(calls) > call + 1 and caplog.text.count("no memory is left") == 2
    assert engine.limits.rows == (8 if invariant else 2) and engine.limits.page_share == 0.25
    _same(engine.generate(PROMPTS, SAMPLING), wanted)
    assert caplog.text.count("no memory is left") == 2


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("times", [1, 2])
def test_sampling_whose_memory_was_held_unused_begins_once_again_as_it_was(
    policy: Policy, caplog: pytest.LogCaptureFixture, place: str, times: int
) -> None:
    """Even where rows are to stay as many; then with fewer."""
    queue, owner, name, call = PLACES[place]
    sampling = replace(SAMPLING, fixed_rows=times == 1)
    wanted = _engine(policy, queue, 8).generate(PROMPTS, sampling)
    engine, calls = _engine(policy, queue, 8), range(call, call + times)
    with failing(owner, name, _unused(), calls, midway=True):
        _same(engine.generate(PROMPTS, sampling), wanted)
    assert caplog.text.count("sampling again as it was") == 1 and caplog.text.count("no memory is left") == times
    assert engine.limits.rows == (8 if times == 1 else 4) and (engine.limits == engine.configured) == (times == 1)
    assert (engine.state.shortages.limits.value is None) == (times == 1)


def test_the_configured_rows_are_tried_again_after_some_steps(policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="qerl_bench")
    engine = _engine(policy, True, 8)
    state = engine.state.shortages
    found = []
    for step in range(1, 13):
        state.begin(step)
        with shortages(hf_graph.Decoding, "_advance", *([1] if step == 1 else [])):
            engine.generate(PROMPTS, SAMPLING)
        found.append(engine.limits)
    assert [limits.rows for limits in found] == [4] * 11 + [8] and found[-1] == engine.configured
    assert caplog.text.count("completions at a time as planned again") == 1


@pytest.mark.parametrize("invariant", [False, True])
def test_ranks_share_out_the_same_portions_after_a_shortage_on_one(policy: Policy, invariant: bool) -> None:
    engine = _engine(policy, False, 8, invariant=invariant)
    before = engine.prompts_at_once(2)
    with shortages(hf_reference, "prefill", 1):
        engine.generate(PROMPTS, SAMPLING)
    assert engine.limits != engine.configured and engine.prompts_at_once(2) == before == (1 if invariant else 4)


def test_rows_that_are_to_stay_as_many_end_the_run_in_words(policy: Policy) -> None:
    """Except for invariant rows, which only give up pages, and so keep their bits."""
    exact = SharedEngine(_engine(policy, True, 8), World(), exact=True)
    said = r"2.00 GiB.*engine.max_num_seqs=8.*parallel.exact=true"
    with shortages(hf_graph.Decoding, "_advance", 1), pytest.raises(TrainingStopped, match=said):
        exact.generate(PROMPTS, SAMPLING)
    with shortages(hf_graph.Decoding, "_advance", 1):
        assert _engine(policy, True, 8, invariant=True).generate(PROMPTS, replace(SAMPLING, fixed_rows=True))


def test_training_gives_up_its_recordings_for_a_rollout(policy: Policy) -> None:
    class Passes:
        released = 0

        def release(self) -> None:
            self.released += 1

    passes: Any = Passes()
    state, engine = TrainerState(passes=passes), _engine(policy, True)
    with state.joined_by(engine), shortages(hf_graph.Decoding, "_advance", 1):
        engine.generate(PROMPTS, SAMPLING)
    assert passes.released == 1 and state.shortages.limits.value is not None


def test_an_engine_joins_a_run_if_it_can_whatever_is_around_it(policy: Policy) -> None:
    state, engine, own = TrainerState(), _engine(policy, True), object()  # which knows nothing of training
    with state.joined_by(own), state.joined_by(innermost(WrappedEngine(WrappedEngine(engine)))):
        assert state.engines == [engine] and engine.state is state
    assert state.engines == []


@pytest.mark.parametrize(
    ("queue", "owner", "name"), [(True, decode_buffers, "_memory"), (False, hf_reference, "prefill")]
)
def test_a_row_that_does_not_fit_is_told(policy: Policy, queue: bool, owner: Any, name: str) -> None:
    engine, told = _engine(policy, queue), pytest.raises(TrainingStopped, match=f"rollout: {NO_MEMORY}")
    with shortages(owner, name, *range(1, 99)), told, memory_for("rollout"):  # no refusal, which deletes new folders
        engine.generate(PROMPTS, SAMPLING)
    assert engine.limits.rows == 1


def test_halves_of_halves_end() -> None:
    limits, rows = Limits(rows=256, prefill_tokens=8192), []
    while (smaller := limits.smaller(4096)) is not None:
        limits = smaller
        rows.append(limits.rows)
    assert rows == [128, 64, 32, 16, 8, 4, 2, 1]
    limits, shares = Limits(rows=256, invariant=True), []
    while (smaller := limits.smaller(4096)) is not None:
        limits = smaller
        shares.append(limits.page_share)
    assert Limits(rows=4096).smaller(64) == Limits(rows=32, prefill_tokens=4096, page_share=0.5)
    assert Limits(rows=4096).smaller(1) is None
    assert limits.rows == 256 and shares == [2**-n for n in range(1, 6)]


def test_an_evaluation_compares_adapters_in_smaller_batches(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = _engine(policy, True).generate(PROMPTS, SAMPLING)
    wanted, stats = adapter_check.check_completions(policy, rollouts), policy.token_stats
    rows: list[int] = []

    def short(ids: torch.Tensor, *others: Any) -> Any:
        rows.append(len(ids))
        if len(ids) > 4:
            raise torch.OutOfMemoryError
        return stats(ids, *others)

    monkeypatch.setattr(policy, "token_stats", short)
    assert adapter_check.check_completions(policy, rollouts) == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert rows == 2 * [16, 8, 4, 4, 8, 4, 4]


def test_a_code_that_a_last_bit_moves_is_no_other_model(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200 keys in INT8 had 0.0014 nats between engine and trainer, in FP32."""
    rollouts = [replace(one, logprobs=[x - 0.01 for x in one.logprobs]) for one in _rollouts(policy)]
    with pytest.raises(AssertionError, match=r"are 0\.01 nats apart"):
        adapter_check.check_completions(policy, rollouts)
    monkeypatch.setattr(policy.kv, "kinds", Kinds("int8", "int8", "int8"))
    assert adapter_check.check_completions(policy, rollouts)["engine_gap"] == pytest.approx(0.01, abs=1e-4)
    far = [replace(one, logprobs=[x - 0.3 for x in one.logprobs]) for one in _rollouts(policy)]
    with pytest.raises(AssertionError, match=r"are 0\.3 nats apart"):
        adapter_check.check_completions(policy, far)


def _rollouts(policy: Policy) -> list[Any]:
    return _engine(policy, True).generate(PROMPTS, SAMPLING)


# --- on a GPU --------------------------------------------------------------------------------------------------------


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SHAPE = ("model.hidden_size=512", "model.heads=8", "model.kv_heads=8", "model.intermediate_size=1024")


def _rows(policy: Any, rows: int, length: int) -> Any:
    generator = torch.Generator().manual_seed(rows)
    completions = torch.randint(0, 256, (rows, length), generator=generator).tolist()
    advantages = torch.linspace(-1, 1, rows)
    return make_batch([[1, 2]] * rows, completions, policy.pad_id, policy.device, [[-5.0] * length] * rows, advantages)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_recordings_of_many_shapes_take_what_the_largest_takes(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], run: Any
) -> None:
    """Ten shapes of up to 4,096 tokens: a pool as large as the largest pass, an eighth, and small pieces."""
    words = (*SHAPE, "model.dtype=bfloat16", "train.micro_batch_tokens=4096")
    policy, experiment = make_policy(*words, device="cuda"), make_experiment(*words)
    optimizer = module.make_optimizer(policy, experiment.optim)
    passes = recorded_passes.recorded_passes(experiment, policy)
    assert passes is not None
    state = TrainerState(passes=passes)
    reserved, rooms = [], []
    for step, (rows, length) in enumerate([(16, 250), (20, 190), (12, 310), (28, 120), (10, 380), (4, 900)] * 2):
        module.update(experiment, policy, optimizer, _rows(policy, rows, length), run, step + 1, state=state)
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
        rooms.append(passes.recordings.room)
    assert len(passes.recordings.passes) >= 6 and not run.path.joinpath(memory_plan.FILE).exists()
    before = reserved[0] - rooms[0]  # weights, gradients, buffers
    assert max(reserved) < before + 1.15 * rooms[-1] + 2**28
    assert max(reserved[6:]) - min(reserved[6:]) < 2**26  # the second round replays
    passes.release()
    optimizer.zero_grad()
    gpu_share.release()
    assert torch.cuda.memory_reserved() < reserved[-1] - 0.9 * rooms[-1]  # nothing pins the pool


@pytest.mark.parametrize("call", [pytest.param(1, marks=GPU), pytest.param(3, marks=GPU), pytest.param(5, marks=GPU)])
def test_a_shortage_while_a_pass_is_recorded_on_a_gpu(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], run: Any, call: int
) -> None:
    """In a first warm-up, in one for the pool, in the recording itself: plain passes from then on, with the numbers of
    a run without recordings."""
    words = (*SHAPE, "train.micro_batch_tokens=2048", "kernel=torch")
    results = []
    for capture in ("off", "auto"):
        policy, experiment = make_policy(*words, device="cuda"), make_experiment(*words, f"train.capture={capture}")
        optimizer = module.make_optimizer(policy, experiment.optim)
        state = TrainerState(passes=recorded_passes.recorded_passes(experiment, policy))
        found = []
        for step, (rows, length) in enumerate([(8, 200), (8, 120), (8, 200)]):
            batch = _rows(policy, rows, length)
            with shortages(policy, "token_stats", *([call] if capture == "auto" and step == 0 else [])):
                found.append(module.update(experiment, policy, optimizer, batch, run, step + 1, state=state))
        results.append((found, torch.cat([p.detach().flatten().cpu() for p in policy.trainable])))
    (plain, weights), (short, others) = results
    assert run.stored["shortage"]["recorded"] is False
    for one, two in zip(plain, short, strict=True):
        assert two == pytest.approx(one, rel=1e-4, abs=1e-5)
    assert (weights - others).abs().quantile(0.99) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_that_is_really_full_in_the_middle_of_a_rollout(make_policy: Callable[..., Any]) -> None:
    """All memory is taken when the first prompt is read, and given back before the second attempt, which draws what an
    engine of that size draws."""
    words = ("model.heads=8", "model.kv_heads=8", "model.hidden_size=512", "model.dtype=bfloat16")
    policy = make_policy(*words, device="cuda", adapted=True)
    wanted = hf.HFEngine(policy, 8).generate(PROMPTS, SAMPLING)
    engine, read, release = hf.HFEngine(policy, 16), hf_graph.Decoding._read, hf.release
    taken: list[torch.Tensor] = []
    attempts: list[int] = []

    def filled(self: Any, prompts: Any) -> None:
        attempts.append(self.buffers.size.rows)
        if len(attempts) == 1:
            torch.cuda.empty_cache()
            room = torch.cuda.mem_get_info()[0] - 2**27
            taken.append(torch.empty(room, dtype=torch.uint8, device="cuda"))
            torch.empty(2**30, dtype=torch.uint8, device="cuda")  # for which there is no room any more
        read(self, prompts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_graph.Decoding, "_read", filled)
        patch.setattr(hf, "release", lambda: (taken.clear(), release()))
        found = engine.generate(PROMPTS, SAMPLING)
    assert attempts[0] == 16 and {*attempts[1:]} == {8} and engine.limits.rows == 8
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
