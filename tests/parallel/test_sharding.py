"""parallel.shard=true: ranks that keep a part of the base each make the numbers of one process."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qerl_bench.config import build, compose
from qerl_core.checks import ConfigError
from tests.models.builds import build as build_checkpoint
from tests.parallel.ranks import Ended, run
from tests.parallel.test_ranks import WORDS, assert_equal, kill_in_step_3, records, weights

pytestmark = pytest.mark.slow
SHARD = "parallel.shard=true"
EXACT = "parallel.exact=true"


class Made:
    """Runs below `place`, each made once."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.before: dict[tuple[object, ...], Path] = {}

    def __call__(self, name: str, size: int, *words: str, sabotage: Any = None) -> tuple[Path, Ended]:
        left_out = [*(["lora."] if "lora=none" in words else []), *(["model."] if "model=hub" in words else [])]
        common = [word for word in WORDS if not word.startswith(tuple(left_out))]
        given = [*common, f"root={self.place / name}", *words]
        return self.place / name / "runs" / "run", run(given, size, self.place / f"{name}.log", sabotage)

    def alone(self, *words: str) -> Path:
        """The run of one process, which holds the whole base."""
        if words not in self.before:
            self.before[words], ended = self(f"alone-{len(self.before)}", 1, *words)
            assert ended.codes == [0], ended.said
        return self.before[words]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("sharding"))


def short_inside_a_pass(step: int, rank: int) -> None:
    """In the given step memory runs out on rank 1 after the first block of a pass with gradient."""
    import qerl_bench.experiment as loop
    from qerl_bench.quant.linear import PackedLinear

    train_step, forward, calls = loop.train_step, PackedLinear.forward, []

    def now(setup: Any, optimizer: Any, lag: Any, number: int) -> dict[str, float]:
        if number == step:
            calls.append(0)
        return train_step(setup, optimizer, lag, number)

    def short(self: Any, *arguments: Any) -> torch.Tensor:
        if rank == 1 and calls and torch.is_grad_enabled():
            calls.append(1)
            if len(calls) == 10:
                raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return forward(self, *arguments)

    loop.train_step, PackedLinear.forward = now, short  # type: ignore[method-assign]


def killed_between_blocks(rank: int) -> None:
    """Rank 1 dies in its 40th pass of a packed layer in the training of a step."""
    import qerl_bench.train.update as training
    from qerl_bench.quant.linear import PackedLinear

    forward_backward, forward, calls = training.forward_backward, PackedLinear.forward, []

    def trains(*arguments: Any) -> Any:
        calls.append(0)
        return forward_backward(*arguments)

    def dying(self: Any, *arguments: Any) -> torch.Tensor:
        if rank == 1 and calls:
            calls.append(1)
            if len(calls) == 40:
                os.kill(os.getpid(), signal.SIGKILL)
        return forward(self, *arguments)

    training.forward_backward, PackedLinear.forward = trains, dying  # type: ignore[method-assign]


def rounding_what_travels(rank: int) -> None:
    import torch.distributed.fsdp as fsdp

    import qerl_bench.model.sharding as sharding

    rounding = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    sharding.fully_shard = partial(fsdp.fully_shard, mp_policy=rounding)


def trained(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All weights, moments of AdamW, and weights of the step before, by name."""
    kept = torch.load(checkpoint / "trainer.pt", weights_only=True)
    moments = {f"{number}.{name}": one for number, of in kept["optimizer"]["state"].items() for name, one in of.items()}
    lagged = {f"lag.{number}": one for number, one in enumerate(kept["lag"][0])}
    return load_file(checkpoint / "model" / "model.safetensors") | moments | lagged


def own_bytes(said: str) -> tuple[int, int]:
    """What rank 0 says that it keeps, and of how much."""
    (found,) = re.findall(r"keeps ([\d,]+) of ([\d,]+) bytes", said)
    kept, whole = (int(number.replace(",", "")) for number in found)
    return kept, whole


@pytest.mark.parametrize("quant", ["nvfp4", "bf16"])
def test_a_sharded_base_with_exact_makes_one_process_to_the_bit(quant: str, made: Made) -> None:
    word = f"quant={quant}"
    folder, ended = made(f"exact-{quant}", 2, word, SHARD, EXACT)
    assert ended.codes == [0, 0], ended.said
    assert_equal(made.alone(word), folder)
    kept, whole = own_bytes(ended.said)
    assert 0 < kept < whole


def test_a_head_that_is_more_than_a_matrix_makes_no_pass_of_its_own(made: Made) -> None:
    """Gemma 2 has a soft cap behind it, so the head is a copy of the model around no block."""
    folder = build_checkpoint("gemma2", made.place / "gemma2")
    words = ("model=hub", f"model.id={folder}", "model.dtype=float32", "quant=int8", "train.micro_batch_tokens=400")
    of_two, ended = made("two-gemma2", 2, *words, SHARD, EXACT)
    assert ended.codes == [0, 0], ended.said
    assert_equal(made.alone(*words), of_two)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (2, ("quant=nvfp4",)),
        (3, ("quant=nvfp4", "train.recompute=full")),  # 32 and 64 rows: one rank has fewer
        (2, ("quant=nf4", "model.hidden_size=64", "train.recompute=selective")),
        (2, ("quant=int8", "lora.targets=[q_proj]")),  # the first block's input has no gradient, nor do some layers
        (2, ("quant=bf16", "lora.train_norms=true", "kl.coef=0.1")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_ranks_that_keep_a_part_each_train_as_one_process(size: int, words: tuple[str, ...], made: Made) -> None:
    folder, ended = made(re.sub(r"\W", "-", "-".join([str(size), *words])), size, *words, SHARD)
    assert {*ended.codes} == {0}, ended.said
    alone = made.alone(*(word for word in words if not word.startswith("train.recompute")))
    assert (folder / "rollouts.jsonl").read_text() == (alone / "rollouts.jsonl").read_text()
    for expected, found in zip(records(alone), records(folder), strict=True):
        assert found.pop("kind") == expected.pop("kind")
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)
    expected, found = weights(alone), weights(folder)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("then", [1, 3])
def test_training_all_weights_is_that_of_one_process_and_continues_with_any_number(then: int, made: Made) -> None:
    """A killed run of two ranks, which goes on with `then`, against an uninterrupted one of one process."""
    words = ("quant=bf16", "lora=none", "optim.lr=0.001", "rollout.lag=1")
    name = f"full-{then}"
    folder, ended = made(name, 2, *words, SHARD, sabotage=partial(kill_in_step_3, 1))
    assert ended.codes == [1, -signal.SIGKILL] and ended.said.count("another process has ended") == 1, ended.said
    kept, whole = own_bytes(ended.said)
    assert 0 < kept < whole
    folder, ended = made(name, then, *words, SHARD)
    assert {*ended.codes} == {0}, ended.said
    alone = made.alone(*words)
    assert (folder / "rollouts.jsonl").read_text() == (alone / "rollouts.jsonl").read_text()
    for expected, found in zip(records(alone), records(folder), strict=True):
        assert found["kind"] == expected["kind"]
        for key in {"reward/mean", "grad_norm", "entropy", "loss"} & expected.keys():
            assert found[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key
    for step in (2, 4):
        expected, found = (trained(one / "checkpoints" / f"step_{step:06d}") for one in (alone, folder))
        assert expected.keys() == found.keys() and len(expected) > 60
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("sabotage", [partial(kill_in_step_3, 1), killed_between_blocks], ids=["step", "block"])
def test_a_rank_that_dies_ends_all_in_words_and_any_number_continues(sabotage: Any, made: Made) -> None:
    name = "dies-in-" + ("step" if isinstance(sabotage, partial) else "block")
    folder, ended = made(name, 2, SHARD, EXACT, sabotage=sabotage)
    assert ended.codes == [1, -signal.SIGKILL], ended.said
    assert ended.said.count("another process has ended") == 1 and "Traceback" not in ended.said
    assert not (folder / "done.json").exists()
    folder, ended = made(name, 1 if isinstance(sabotage, partial) else 3, SHARD, EXACT)
    assert {*ended.codes} == {0}, ended.said
    assert_equal(made.alone("quant=nvfp4"), folder)


def test_memory_that_runs_out_inside_a_pass_ends_all_with_a_remedy(made: Made) -> None:
    folder, ended = made("short", 2, SHARD, EXACT, sabotage=partial(short_inside_a_pass, 3))
    assert ended.codes == [1, 1], ended.said
    assert "Tried to allocate 2.00 GiB" in ended.said and "Traceback" not in ended.said
    folder, ended = made("short", 2, SHARD, EXACT)
    assert ended.codes == [0, 0], ended.said
    assert_equal(made.alone("quant=nvfp4"), folder)


def test_codes_and_scales_that_would_be_rounded_on_the_way_stop_the_run(made: Made) -> None:
    _, ended = made("rounded", 2, "quant=bf16", SHARD, sabotage=rounding_what_travels)
    assert ended.codes == [1, 1] and ended.said.count("other bytes than before it was cut") == 1, ended.said


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("engine=vllm",), "engine=hf"),
        (("lora=none", "quant=bf16", EXACT), "parallel.exact=false"),
        (("lora=none", "quant=bf16", "train.autocast=true"), "train.autocast=false"),
        (("lora=none", "quant=bf16", "optim.optimizer=adamw_8bit"), "optim.optimizer=adamw"),
        (("lora.experts=true",), "lora.experts=false"),
        (("kernel=block",), "kernel=auto"),
        (("noise.where=adapters",), "noise.where=norms"),
        (("rollout.merge=true",), "rollout.merge=false"),
        (("rollout.quant=mxfp4",), "rollout.quant"),
        (("eval.quant=bf16",), "eval.quant"),
        (("eval.also=[bf16]",), "eval.also"),
    ],
)
def test_what_reads_a_whole_base_is_refused_with_a_remedy(words: tuple[str, ...], remedy: str) -> None:
    given = ["experiment=smoke", "device=cpu", *(() if "quant=bf16" in words else ("quant=nvfp4",)), *words]
    build(compose(given))
    with pytest.raises(ConfigError, match=rf"parallel\.shard=true .*{re.escape(remedy)}"):
        build(compose([*given, SHARD]))
