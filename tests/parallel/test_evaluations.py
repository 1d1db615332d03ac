"""Evaluations in two processes: the record of one, each question asked and graded on one rank, an end in words."""

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

from qerl_bench.commands.eval import main, render
from qerl_core.checks import ConfigError
from qerl_core.process.arguments import whole
from tests.parallel.ranks import Ended, run
from tests.parallel.test_ranks import WORDS, on

pytestmark = pytest.mark.slow
PROBLEMS = Path(__file__).parents[1] / "assets" / "gsm8k_tiny.jsonl"
Evaluate = Callable[..., tuple[Path, Ended]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has visibly changed its policy, with a large learning rate."""
    root = tmp_path_factory.mktemp("evaluations")
    words = [*WORDS, "aqn=none", "optim.lr=0.05", f"root={root}"]
    ended = run(words, 1, root / "made.log")
    assert ended.codes == [0], ended.said
    return root / "runs" / "run"


@pytest.fixture(scope="module")
def evaluate(finished: Path) -> Evaluate:
    """evaluate("name", 2, "eval=lm_eval"): `qerl-bench eval` in two processes, into a folder of that name."""

    def make(name: str, size: int, *words: str, sabotage: Any = None) -> tuple[Path, Ended]:
        out = finished.parents[1] / name
        said = out.with_name(f"{name}.log")
        return out, run([str(finished), f"out={out}", *words], size, said, sabotage, "eval")

    return make


def assert_equal(one: Path, other: Path) -> None:
    """The same tokens and scores; log-probabilities may be rounded otherwise."""
    pd.testing.assert_frame_equal(pd.read_parquet(one / "samples.parquet"), pd.read_parquet(other / "samples.parquet"))
    expected, found = (json.loads((folder / "eval.json").read_text()) for folder in (one, other))
    assert len(expected) == len(found) > 0
    for before, after in zip(expected, found, strict=True):
        settings = before.pop("settings"), after.pop("settings")
        assert before == after and settings[0] == pytest.approx(settings[1], abs=1e-6)


def noting(folder: Path, rank: int) -> None:
    """Each rank writes which prompts it answers, and which questions lm-eval grades there."""
    import lm_eval.api.task as tasks

    import qerl_bench.engine.hf as hf

    generate, grade = hf.HFEngine.generate, tasks.ConfigurableTask.process_results

    def note(what: str, names: list[str]) -> None:
        with open(folder / f"{what}-{rank}", "a") as file:
            file.write("".join(f"{name}\n" for name in names))

    def generate_and_note(self: Any, prompts: Any, sampling: Any) -> Any:
        note("answered", [prompt.id for prompt in prompts])
        return generate(self, prompts, sampling)

    def grade_and_note(self: Any, doc: Any, results: Any) -> Any:
        note("graded", [doc["id"]])
        return grade(self, doc, results)

    hf.HFEngine.generate, tasks.ConfigurableTask.process_results = generate_and_note, grade_and_note


def noted(folder: Path, what: str) -> list[list[str]]:
    files = [folder / f"{what}-{rank}" for rank in range(2)]
    return [file.read_text().splitlines() if file.exists() else [] for file in files]


def kill_after_training(victim: int, rank: int) -> None:
    """The rank `victim` is killed in the evaluation of the trained policy."""
    import qerl_bench.engine.shared as shared
    from qerl_bench.model.policy import Policy

    load, loaded = Policy.load, []
    generate = shared.SharedEngine.generate

    def load_and_note(self: Any, folder: Path) -> None:
        load(self, folder)
        loaded.append(folder)

    def generate_or_die(self: Any, prompts: Any, sampling: Any) -> Any:
        if rank == victim and loaded:
            os.kill(os.getpid(), signal.SIGKILL)
        return generate(self, prompts, sampling)

    Policy.load, shared.SharedEngine.generate = load_and_note, generate_or_die


def another_base_on_rank_1(rank: int) -> None:
    from qerl_bench import run_setup

    build = run_setup.build_policy

    def build_policy(*arguments: Any) -> Any:
        policy = build(*arguments)
        if rank == 1:
            policy.trainable[0].data.view(-1)[0] += 1e-3
        return policy

    run_setup.build_policy = build_policy


def test_two_ranks_make_the_record_of_one_process(evaluate: Evaluate) -> None:
    words = ("eval=task", "eval.questions=5", "eval.samples=3")
    alone, _ = evaluate("task-1", 1, *words)
    out, ended = evaluate("task-2", 2, *words)
    assert ended.codes == [0, 0], ended.said
    assert ended.said.count(whole(render(out))) == 1 and ended.said.count("step 4, 5 questions") == 1, ended.said
    assert_equal(alone, out)
    assert json.loads((out / "env.json").read_text())["ranks"] == 2
    texts = {step: [*rows["completion"]] for step, rows in pd.read_parquet(out / "samples.parquet").groupby("step")}
    assert len(texts) == 2 and texts[0] != texts[4]  # the adapter answers at step 4, the base at step 0
    _, ended = evaluate("task-2", 2, *words)
    assert ended.codes == [0, 0] and ended.said.count("evaluated before") == 1, ended.said


def test_lm_eval_asks_and_grades_each_question_on_one_rank(evaluate: Evaluate, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    words = ("eval=lm_eval", "eval.protocol=held_out", "eval.questions=5")  # one rank has more, lm-eval fills up
    alone, _ = evaluate("held-out-1", 1, *words)
    out, ended = evaluate("held-out-2", 2, *words, sabotage=partial(noting, tmp_path))
    assert ended.codes == [0, 0], ended.said
    assert_equal(alone, out)
    evaluations = 2
    questions = [*pd.read_parquet(out / "samples.parquet").query("step == 0")["question"]]
    assert noted(tmp_path, "graded") == [evaluations * questions[::2], evaluations * questions[1::2]]
    answered = [question for of_rank in noted(tmp_path, "answered") for question in of_rank]
    assert sorted(answered) == sorted(f"even_characters/{number}" for number in [*range(5)] * evaluations)


def test_lm_eval_shows_two_ranks_the_worked_examples_of_one(evaluate: Evaluate, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    lines = PROBLEMS.read_text(encoding="utf-8").splitlines(keepends=True)
    for split, those in (("train", lines[:8]), ("test", lines[8:])):
        (tmp_path / f"{split}.jsonl").write_text("".join(those), encoding="utf-8")
    files = (f"task.train_file={tmp_path / 'train.jsonl'}", f"task.eval_file={tmp_path / 'test.jsonl'}")
    words = (
        "task=gsm8k",
        "task.max_completion_tokens=12",
        *files,
        "eval=lm_eval",
        "eval.protocol=standard",
        "eval.questions=3",
    )
    (alone, first), (out, second) = (evaluate(f"standard-{size}", size, *words) for size in (1, 2))
    assert (first.codes, second.codes) == ([0], [0, 0]), first.said + second.said
    assert_equal(alone, out)


def test_a_run_has_lm_eval_ask_fewer_questions_than_there_are_ranks(finished: Path) -> None:
    pytest.importorskip("lm_eval")
    root = finished.parents[1]
    words = [*WORDS, "steps=1", "eval=lm_eval", "eval.questions=1", "parallel.exact=true"]
    for size in (1, 2):
        ended = run([*words, f"root={root / str(size)}"], size, root / "one-question.log")
        assert {*ended.codes} == {0}, ended.said
    assert_equal(root / "1" / "runs" / "run", root / "2" / "runs" / "run")


def test_a_killed_rank_ends_all_in_words_and_the_evaluation_can_be_repeated(evaluate: Evaluate) -> None:
    """The rank that writes is left."""
    words = ("eval=task", "eval.questions=4")
    alone, _ = evaluate("whole", 1, *words)
    out, ended = evaluate("killed", 2, *words, sabotage=partial(kill_after_training, 1))
    assert ended.codes == [1, -signal.SIGKILL]
    assert ended.said.count("another process has ended") == 1 and "Traceback" not in ended.said
    assert not (out / "done.json").exists()
    _, ended = evaluate("killed", 2, *words)
    assert ended.codes == [0, 0], ended.said
    assert_equal(alone, out)


@pytest.mark.parametrize(
    ("words", "sabotage", "key"),
    [
        (["eval.questions=1"], None, "--nproc-per-node 1"),
        (["eval=task"], partial(on, ["NVIDIA H200, 140 GiB", "no GPU"]), "process 1 has no GPU"),
        (["eval=none"], None, "eval=none evaluates nothing"),
        (["optim.lr=1"], None, "optim.lr=1 would change what was trained"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_once(
    words: list[str], sabotage: Any, key: str, evaluate: Evaluate
) -> None:
    out, ended = evaluate("refused", 2, "eval=task", *words, sabotage=sabotage)
    assert ended.codes == [2, 2] and ended.said.count(key) == 1 and "Traceback" not in ended.said, ended.said
    assert not out.exists()


def test_ranks_that_hold_different_weights_evaluate_nothing(evaluate: Evaluate) -> None:
    out, ended = evaluate("different", 2, "eval=task", sabotage=another_base_on_rank_1)
    assert ended.codes == [1, 1] and ended.said.count("different weights, first") == 1, ended.said
    assert not (out / "eval.json").exists()


def test_commands_that_do_not_share_their_work_are_refused_once(tmp_path: Path) -> None:
    ended = run([str(tmp_path)], 2, tmp_path / "said", command="status")
    assert ended.codes == [2, 2]
    assert ended.said.count("leave torchrun out, qerl-bench status") == 1 and len(ended.said.splitlines()) == 1


def test_a_rank_that_torchrun_has_not_started_is_refused(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=r"RANK=1 .* --nproc-per-node .* -u RANK"):
        main([str(finished), "eval=task"])
