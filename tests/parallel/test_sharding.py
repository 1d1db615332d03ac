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
SHARD, EXACT = "parallel.shard=true", "parallel.exact=true"


class Made:
    """Runs below `place`; those of one process are made once."""

    def __init__(self, place: Path) -> None:
        self.place, self.before = place, dict[tuple[str, ...], Path]()

    def __call__(self, name: str, size: int, *words: str, sabotage: Any = None) -> tuple[Path, Ended]:
        left_out = [axis for axis, word in (("lora.", "lora=none"), ("model.", "model=hub")) if word in words]
        common = [word for word in WORDS if not word.startswith(tuple(left_out))]
        ended = run([*common, f"root={self.place / name}", *words], size, self.place / f"{name}.log", sabotage)
        return self.place / name / "runs" / "run", ended

    def alone(self, *words: str) -> Path:
        if words not in self.before:
            self.before[words], ended = self(f"alone-{len(self.before)}", 1, *words)
            assert ended.codes == [0], ended.said
        return self.before[words]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("sharding"))


def in_a_pass(what: str, rank: int) -> None:
    """In the training of step 3 rank 1 is killed, or runs out of memory, at the tenth packed layer."""
    import qerl_bench.experiment as loop
    from qerl_bench.quant.linear import PackedLinear

    train_step, forward, calls = loop.train_step, PackedLinear.forward, []

    def noted(*given: Any) -> dict[str, float]:
        calls.extend([0] if given[-1] == 3 else [])
        return train_step(*given)

    def failing(self: Any, *given: Any) -> torch.Tensor:
        if rank == 1 and calls and torch.is_grad_enabled():
            calls.append(1)
            if len(calls) == 10 and what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif len(calls) == 10:
                raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return forward(self, *given)

    loop.train_step, PackedLinear.forward = noted, failing  # type: ignore[method-assign]


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


def keeps_a_part(said: str) -> bool:
    ((kept, whole),) = re.findall(r"keeps ([\d,]+) of ([\d,]+) bytes", said)
    return 0 < int(kept.replace(",", "")) < int(whole.replace(",", ""))


@pytest.mark.parametrize("kind", ["nvfp4", "bf16", "gemma2"])  # the last has a soft cap behind its head
def test_a_sharded_base_with_exact_makes_one_process_to_the_bit(kind: str, made: Made) -> None:
    words: tuple[str, ...] = (f"quant={kind}",)
    if kind == "gemma2":
        folder = build_checkpoint(kind, made.place / kind)
        words = ("model=hub", f"model.id={folder}", "model.dtype=float32", "quant=int8", "train.micro_batch_tokens=400")
    folder, ended = made(f"exact-{kind}", 2, *words, SHARD, EXACT)
    assert ended.codes == [0, 0] and keeps_a_part(ended.said), ended.said
    assert_equal(made.alone(*words), folder)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (3, ("quant=nvfp4", "train.recompute=full")),  # rows of which one rank has fewer
        (2, ("quant=nf4", "model.hidden_size=64", "train.recompute=selective")),
        (2, ("quant=int8", "lora.targets=[q_proj]", "lora.train_norms=true", "kl.coef=0.1")),
    ],
    ids=["nvfp4", "nf4", "int8"],
)
def test_ranks_that_keep_a_part_each_train_as_one_process(size: int, words: tuple[str, ...], made: Made) -> None:
    folder, ended = made(f"near-{words[0][6:]}", size, *words, SHARD)
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
    words = ("quant=bf16", "lora=none", "optim.lr=0.001", "rollout.lag=1")
    folder, ended = made(f"full-{then}", 2, *words, SHARD, sabotage=partial(kill_in_step_3, 1))
    assert ended.codes == [1, -signal.SIGKILL] and ended.said.count("another process has ended") == 1, ended.said
    assert keeps_a_part(ended.said)
    folder, ended = made(f"full-{then}", then, *words, SHARD)
    assert {*ended.codes} == {0}, ended.said
    alone = made.alone(*words)
    assert (folder / "rollouts.jsonl").read_text() == (alone / "rollouts.jsonl").read_text()
    for expected, found in zip(records(alone), records(folder), strict=True):
        for key in {"reward/mean", "grad_norm", "entropy", "loss"} & expected.keys():
            assert found[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key
    for step in (2, 4):
        expected, found = (trained(one / "checkpoints" / f"step_{step:06d}") for one in (alone, folder))
        assert expected.keys() == found.keys() and len(expected) > 60
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("what", ["killed", "short"])
def test_a_rank_that_ends_inside_a_pass_ends_all_in_words_and_any_number_continues(what: str, made: Made) -> None:
    folder, ended = made(what, 2, SHARD, EXACT, sabotage=partial(in_a_pass, what))
    assert ended.codes == [1, -signal.SIGKILL if what == "killed" else 1], ended.said
    said = "another process has ended" if what == "killed" else "or more processes: Tried to allocate 2.00 GiB"
    assert ended.said.count(said) == 1 and "Traceback" not in ended.said, ended.said
    assert not (folder / "done.json").exists()
    folder, ended = made(what, 3 if what == "killed" else 1, SHARD, EXACT)
    assert {*ended.codes} == {0}, ended.said
    assert_equal(made.alone("quant=nvfp4"), folder)


def test_weights_that_would_be_rounded_on_the_way_stop_the_run(made: Made) -> None:
    _, ended = made("rounded", 2, "quant=bf16", SHARD, sabotage=rounding_what_travels)
    assert ended.codes == [1, 1] and ended.said.count("other bytes than before it was cut") == 1, ended.said


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("engine=vllm", "engine=hf"),
        ("quant=bf16 lora=none parallel.exact=true", "parallel.exact=false"),
        ("quant=bf16 lora=none train.autocast=true", "train.autocast=false"),
        ("quant=bf16 lora=none optim.optimizer=adamw_8bit", "optim.optimizer=adamw"),
        ("lora.experts=true", "lora.experts=false"),
        ("kernel=block", "kernel=auto"),
        ("noise.where=adapters", "noise.where=norms"),
        ("rollout.merge=true", "rollout.merge=false"),
        ("rollout.quant=mxfp4", "rollout.quant"),
        ("eval.quant=bf16", "eval.quant"),
        ("eval.also=[bf16]", "eval.also"),
    ],
)
def test_what_reads_a_whole_base_is_refused_with_a_remedy(words: str, remedy: str) -> None:
    given = ["experiment=smoke", "device=cpu", "quant=nvfp4", *words.split()]
    build(compose(given))
    with pytest.raises(ConfigError, match=rf"parallel\.shard=true .*{re.escape(remedy)}"):
        build(compose([*given, SHARD]))
