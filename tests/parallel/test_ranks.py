"""One run in two processes: the numbers of one process, the same every time, and an end in words."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from qerl_bench.parallel import World, joined_ranks, largest
from qerl_core.checks import ConfigError
from qerl_core.metrics.definitions import BY_SIGN
from qerl_studies.runs.load import load_run
from tests.parallel.ranks import Ended, run
from tests.parallel.speed import row, with_ratios

pytestmark = pytest.mark.slow
# Two chunks of sampling and, with sequences of unequal lengths, four micro-batches of a single process.
WORDS = (
    *("experiment=smoke", "device=cpu", "quant=nvfp4", "aqn=exp", "steps=4", "save_every=2", "name=run"),
    *("model.layers=2", "model.hidden_size=32", "model.heads=2", "model.kv_heads=1", "model.intermediate_size=64"),
    *("lora.rank=4", "rollout.prompts_per_step=3", "rollout.group_size=4", "engine.max_num_seqs=8"),
    *(
        "train.micro_batch_tokens=80",
        "train.mismatch_share=1",
        "train.updates_per_batch=2",
        "eval.questions=4",
        "task.max_completion_tokens=12",
    ),
)
Run = Callable[..., tuple[Path, Ended]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def make_run(place: Path) -> Run:
    """make_run("name", 2, "parallel.exact=true"): run, or continue, a run of that name in two processes."""

    def make(name: str, size: int, *words: str, sabotage: Any = None) -> tuple[Path, Ended]:
        every = ("eval.every=2", "eval.every_questions=3")
        ended = run([*WORDS, *every, f"root={place / name}", *words], size, place / f"{name}.log", sabotage)
        return place / name / "runs" / "run", ended

    return make


@pytest.fixture(scope="module")
def alone(make_run: Run) -> Path:
    folder, ended = make_run("alone", 1)
    assert ended.codes == [0], ended.said
    return folder


@pytest.fixture(scope="module")
def summed(make_run: Run) -> Path:
    folder, ended = make_run("summed", 2)
    assert ended.codes == [0, 0], ended.said
    return folder


@pytest.fixture(scope="module")
def exact(make_run: Run, place: Path) -> Path:
    folder, ended = make_run("exact", 2, "parallel.exact=true", sabotage=partial(noting_what_it_grades, place))
    assert ended.codes == [0, 0], ended.said
    return folder


def records(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if not key.startswith(("time", "speed", "memory"))} for line in lines
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Adapter and AdamW's moments after the last step."""
    last = folder / "checkpoints" / "step_000004"
    optimizer = torch.load(last / "trainer.pt", weights_only=True)["optimizer"]["state"]
    moments = {f"{number}.{name}": moment for number, of in optimizer.items() for name, moment in of.items()}
    return load_file(last / "adapter" / "adapter_model.safetensors") | moments


def assert_equal(one: Path, other: Path) -> None:
    """Bit for bit."""
    assert records(one) == records(other)
    expected, found = weights(one), weights(other)
    assert expected.keys() == found.keys() and len(expected) > 40
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert (one / "rollouts.jsonl").read_text() == (other / "rollouts.jsonl").read_text()
    pd.testing.assert_frame_equal(pd.read_parquet(one / "samples.parquet"), pd.read_parquet(other / "samples.parquet"))


def kill_in_step_3(victim: int, rank: int) -> None:
    import qerl_bench.experiment as loop

    step = loop.train_step

    def train_step(*arguments: Any) -> dict[str, float]:
        if rank == victim and arguments[-1] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*arguments)

    loop.train_step = train_step


def nan_on_rank_1(rank: int) -> None:
    import qerl_bench.train.update as training

    forward_backward = training.forward_backward

    def poisoned(experiment: Any, policy: Any, micro_batch: Any, passes: Any) -> Any:
        if rank == 1:
            micro_batch.loss_weights[:] = float("nan")
        return forward_backward(experiment, policy, micro_batch, passes)

    training.forward_backward = poisoned


def little_memory_on_rank_1(rank: int) -> None:
    import qerl_bench.train.update as training

    forward_backward, calls = training.forward_backward, []

    def short(*arguments: Any) -> Any:
        calls.append(1)
        if rank == 1 and len(calls) == 1:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return forward_backward(*arguments)

    training.forward_backward = short


def no_room_for_a_chunk(rank_of_it: int, rank: int) -> None:
    from qerl_bench.engine.hf import HFEngine

    sample, calls = HFEngine._sample, []

    def short(*arguments: Any) -> Any:
        calls.append(1)
        if rank == rank_of_it and len(calls) == 1:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return sample(*arguments)

    HFEngine._sample = short  # type: ignore[method-assign]


def little_memory_and_a_kill(killed: bool, rank: int) -> None:
    no_room_for_a_chunk(0, rank)
    little_memory_on_rank_1(rank + 1)
    if killed:
        kill_in_step_3(0, rank)


def another_adapter_on_rank_1(rank: int) -> None:
    import qerl_bench.experiment as loop

    step = loop.train_step

    def train_step(setup: Any, *others: Any) -> dict[str, float]:
        metrics = step(setup, *others)
        if rank == 1:
            setup.policy.trainable[0].data.view(-1)[0] += 1e-3
        return metrics

    loop.train_step = train_step


def noting_what_it_grades(folder: Path, rank: int) -> None:
    """Each rank writes which completions of evaluations it has graded."""
    import qerl_bench.eval.task as evaluation

    grade = evaluation.grade_rollouts

    def graded(task: Any, rollouts: Any, mode: str) -> list[dict[str, Any]]:
        with open(folder / f"graded-{rank}", "a") as file:
            file.write("".join(f"{mode} {one.prompt.id} {one.sample}\n" for one in rollouts))
        return grade(task, rollouts, mode)

    evaluation.grade_rollouts = graded


def on(devices: list[str], rank: int) -> None:
    from qerl_bench import run_setup

    run_setup.device_name = lambda wanted: devices[rank]


def test_two_ranks_with_exact_are_one_process_to_the_bit(alone: Path, exact: Path) -> None:
    assert_equal(alone, exact)
    assert (exact / "eval.json").read_text() == (alone / "eval.json").read_text()
    assert any(record["train/taught_frac"] == 1 for record in records(exact) if record["kind"] == "train")
    said = json.loads((exact / "env.json").read_text()), json.loads((exact / "engine.json").read_text())
    assert (said[0]["ranks"], said[1]["engines"]) == (2, 2)


def test_each_completion_of_an_evaluation_is_graded_on_one_rank(exact: Path, place: Path) -> None:
    of_ranks = [(place / f"graded-{rank}").read_text().splitlines() for rank in range(2)]
    samples = pd.read_parquet(exact / "samples.parquet")
    assert {*of_ranks[0], *of_ranks[1]} == {*samples[["mode", "question", "sample"]].astype(str).agg(" ".join, axis=1)}
    # Before the first step and after the last 4 greedy completions and 8 sampled ones, in between 3 and 6.
    assert [len(graded) for graded in of_ranks] == [2 * (2 + 4) + 1 + 3, 2 * (2 + 4) + 2 + 3]


def test_two_ranks_draw_the_tokens_of_one_and_train_alike_to_rounding(alone: Path, summed: Path) -> None:
    texts = [
        [json.loads(line)["completion"] for line in (folder / "rollouts.jsonl").read_text().splitlines()]
        for folder in (alone, summed)
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 16
    for expected, found in zip(records(alone), records(summed), strict=True):
        assert found.pop("kind") == expected.pop("kind")
        shares = [{name: one.pop(name) for name in BY_SIGN if name in one} for one in (expected, found)]
        assert shares[1] == pytest.approx(shares[0], abs=1e-3)  # of gaps near 1e-3, which FP32 knows to 1e-6
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    expected, found = weights(alone), weights(summed)
    assert any(not torch.equal(expected[name], found[name]) for name in expected)  # the sum rounds in another order
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_all_in_words_and_any_number_continues(victim: int, alone: Path, make_run: Run) -> None:
    name = f"killed-{victim}"
    folder, ended = make_run(name, 2, "parallel.exact=true", sabotage=partial(kill_in_step_3, victim))
    assert ended.codes[victim] == -signal.SIGKILL and ended.codes[1 - victim] == 1
    assert ended.said.count("another process has ended") == 1 and "Traceback" not in ended.said
    assert not (folder / "done.json").exists()
    folder, ended = make_run(name, [1, 2][victim], "parallel.exact=true")
    assert {*ended.codes} == {0}, ended.said
    assert_equal(alone, folder)


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_with_one_message(make_run: Run) -> None:
    folder, ended = make_run("nan", 2, sabotage=nan_on_rank_1)
    assert ended.codes == [1, 1] and ended.said.count("not finite") == 1, ended.said
    assert (folder / "nonfinite" / "step_000001" / "batch.safetensors").exists()


def test_a_shortage_on_one_rank_makes_smaller_micro_batches_on_all(summed: Path, make_run: Run) -> None:
    """The numbers are those of two ranks that had such micro-batches from the beginning, so both repeat themselves."""
    folder, ended = make_run("short", 2, "train.micro_batch_tokens=160", sabotage=little_memory_on_rank_1)
    assert ended.codes == [0, 0] and ended.said.count("no memory is left") == 1, ended.said
    assert json.loads((folder / "memory.json").read_text())["shortage"]["tokens"] == 80
    assert_equal(summed, folder)


def test_a_shortage_of_sampling_on_one_rank_leaves_the_portions_of_all(alone: Path, make_run: Run) -> None:
    folder, ended = make_run("shorter", 2, sabotage=partial(no_room_for_a_chunk, 1))
    assert ended.codes == [0, 0], ended.said
    texts = [
        [json.loads(line)["completion"] for line in (one / "rollouts.jsonl").read_text().splitlines()]
        for one in (alone, folder)
    ]
    assert texts[0] == texts[1]


def test_a_run_continued_after_a_shortage_repeats_an_uninterrupted_one(make_run: Run) -> None:
    whole, ended = make_run("whole", 1, sabotage=partial(little_memory_and_a_kill, False))
    assert ended.codes == [0] and ended.said.count("no memory is left") == 2, ended.said
    folder, ended = make_run("continued", 1, sabotage=partial(little_memory_and_a_kill, True))
    assert ended.codes == [-signal.SIGKILL], ended.said
    folder, ended = make_run("continued", 1)
    assert ended.codes == [0], ended.said
    assert_equal(whole, folder)


def test_ranks_that_hold_different_weights_save_nothing(make_run: Run) -> None:
    folder, ended = make_run("different", 2, "save_every=1", sabotage=another_adapter_on_rank_1)
    assert ended.codes == [1, 1] and ended.said.count("different weights, first") == 1, ended.said
    assert not [*folder.glob("checkpoints/step_*")]


@pytest.mark.parametrize(
    ("word", "sabotage", "key"),
    [
        ("rollout.prompts_per_step=1", None, "--nproc-per-node 1"),
        ("seed=1", partial(on, ["NVIDIA H200, 140 GiB", "no GPU"]), "process 1 has no GPU"),
        ("seed=1", partial(on, ["NVIDIA H200, 140 GiB", "NVIDIA L4, 22 GiB"]), "Start as many as there are equal GPUs"),
        ("-m", None, "leave torchrun out"),
        ("lora.rank=x", None, "error: lora.rank"),
        ("quant=x", None, "there is no quant=x"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_once(word: str, sabotage: Any, key: str, make_run: Run) -> None:
    folder, ended = make_run("refused", 2, word, sabotage=sabotage)
    assert ended.codes == [2, 2], ended.said
    assert ended.said.count(key) == 1 and "Traceback" not in ended.said
    assert not folder.exists()


def test_a_run_with_too_many_ranks_keeps_what_it_has(make_run: Run) -> None:
    words = ("rollout.prompts_per_step=1", "steps=2")
    folder, ended = make_run("fewer", 1, *words, "save_every=1")
    assert ended.codes == [0], ended.said
    (folder / "done.json").unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "run.log"}
    _, ended = make_run("fewer", 2, *words, "save_every=1")
    assert ended.codes == [2, 2] and "--nproc-per-node 1" in ended.said, ended.said
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}])
def test_variables_that_torchrun_has_not_set_are_refused(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"RANK=.* --nproc-per-node .* -u RANK"), joined_ranks():
        pass


def test_one_process_is_a_world_without_torch_distributed() -> None:
    with joined_ranks() as world:
        assert type(world) is World
        assert (world.rank, world.size, world.gather(3), [*world.take(2)]) == (0, 1, [3], [0, 1])
    assert not torch.distributed.is_initialized()


def test_a_number_of_all_ranks_is_the_largest_even_if_some_lack_it() -> None:
    class Two(World):
        def gather(self, value: Any) -> list[Any]:
            return [value, {"memory/cache_gib": 3.0, "time/recording_s": 1.0}]

    assert largest(Two(), {}) == {"memory/cache_gib": 3.0, "time/recording_s": 1.0}
    assert largest(Two(), {"memory/cache_gib": 4.0}) == {"memory/cache_gib": 4.0, "time/recording_s": 1.0}
    assert largest(World(), {"memory/cache_gib": 4.0}) == {"memory/cache_gib": 4.0}


def test_a_table_of_speeds_takes_no_run_of_another_number_of_ranks(alone: Path, summed: Path) -> None:
    table = with_ratios(pd.DataFrame([row(load_run(alone), "tiny", 1), row(load_run(summed), "tiny", 2)]))
    assert table["step_x"].tolist() == [1.0, pytest.approx(float(table["step_s"].iloc[0] / table["step_s"].iloc[1]))]
    one, two = table["tokens"].tolist()
    assert one == two > 0
    with pytest.raises(ConfigError, match=r"\[2\] ranks, not 1"):
        row(load_run(summed), "tiny", 1)
