"""eval=lm_eval eval.protocol=standard: lm-eval's own benchmarks from local rows, answered by our engine."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qerl_bench.config import compose, spec
from qerl_bench.engine.hf import HFEngine
from qerl_bench.eval.base import metrics_of
from qerl_bench.eval.lm_eval.standard import minerva_math500, raw
from qerl_bench.eval.record import record_evaluation
from qerl_core.checks import ConfigError
from qerl_core.metrics import definitions
from qerl_core.rundir.run_dir import RunDir

TINY = Path(__file__).parents[1] / "assets" / "gsm8k_tiny.jsonl"
pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def policy(make_policy: Callable[..., Any]) -> Any:
    return make_policy(quant="mxfp4", sharp=True, adapted=True)


class Scripted:
    """Keeps what it is asked, and answers question i with `texts[i]` instead of what the engine writes."""

    def __init__(self, policy: Any, texts: list[str]) -> None:
        self.engine, self.policy, self.texts = HFEngine(policy, max_num_seqs=8), policy, texts
        self.asked: list[str] = []

    def generate(self, prompts: list[Any], sampling: Any) -> list[Any]:
        self.asked += [prompt.messages[0]["content"] for prompt in prompts]
        assert (sampling.temperature, sampling.samples, sampling.max_tokens) == (0.0, 1, 256)
        written = self.engine.generate(prompts, replace(sampling, max_tokens=2))
        return [replace(rollout, text=text) for rollout, text in zip(written, self.texts, strict=True)]


def gsm8k(tmp_path: Path, *words: str) -> Any:
    """Eight invented problems to draw worked examples from, four held out."""
    lines = TINY.read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[:8]), encoding="utf-8")
    (tmp_path / "test.jsonl").write_text("".join(lines[8:]), encoding="utf-8")
    files = [f"task.train_file={tmp_path / 'train.jsonl'}", f"task.eval_file={tmp_path / 'test.jsonl'}"]
    return spec(compose(["task=gsm8k", *files, *words]), "task")


def measured(policy: Any, engine: Any, task: Any, folder: Path, questions: int | None = None) -> Any:
    evaluator = spec(compose(["eval=lm_eval", "eval.protocol=standard"]), "eval")
    evaluator = replace(evaluator, questions=questions)
    evaluator.check(task)
    return evaluator.evaluate(policy, engine, task, SimpleNamespace(path=folder), 0)


def test_gsm8k_as_lm_eval_asks_and_counts_it(policy: Any, tmp_path: Path) -> None:
    task = gsm8k(tmp_path)
    golds = [prompt.answer for prompt in task.eval_prompts(None)]
    assert golds == ["68", "98", "750", "2"]
    texts = [
        " He pays 68.\n#### 68\n\nQuestion: another",  # right by both, and cut at the stop string
        " So 98 it is.",  # right for the lenient reader alone
        " #### 75",
        " no idea",
    ]
    engine = Scripted(policy, texts)
    found = measured(policy, engine, task, tmp_path)

    problems = [json.loads(line) for line in TINY.read_text(encoding="utf-8").splitlines()]
    for asked, problem in zip(engine.asked, problems[8:], strict=True):
        *shots, last = asked.split("\n\nQuestion: ")
        assert last == f"{problem['question']}\nAnswer:"
        shown = [shot.removeprefix("Question: ") for shot in shots]
        possible = {f"{row['question']}\nAnswer: {row['answer']}" for row in problems[:8]}
        assert len(shown) == len(set(shown)) == 5 and set(shown) <= possible

    values = {score.metric: score.value for score in found.scores}
    assert values == {"eval/lm_eval_strict_match": 0.25, "eval/lm_eval_flexible_extract": 0.5}
    strict, lenient = (
        [row for row in found.samples if row["mode"] == mode] for mode in ("strict_match", "flexible_extract")
    )
    assert [row["correct"] for row in strict] == [True, False, False, False]
    assert [row["correct"] for row in lenient] == [True, True, False, False]
    assert [row["answer"] for row in strict] == ["68", None, "75", None]
    assert [row["question"] for row in strict] == [f"gsm8k/test/{i}" for i in (1, 2, 3, 4)]
    assert [row["finished"] for row in strict] == [True, False, False, False]
    assert (found.settings["shots"], found.settings["lm_eval_task"], found.settings["task_version"]) == (
        5,
        "gsm8k",
        3.0,
    )
    assert found.settings["engine_gap"] < 1e-3


def test_its_numbers_are_named_and_recorded_with_their_gain(
    policy: Any, tmp_path: Path, make_config: Callable[..., Any]
) -> None:
    task = gsm8k(tmp_path)
    first = measured(policy, Scripted(policy, [" #### 1"] * 3), task, tmp_path, 3)
    second = measured(policy, Scripted(policy, [" #### 68", " #### 98", " #### 1"]), task, tmp_path, 3)
    with RunDir(tmp_path / "run", make_config()) as run:
        record_evaluation(run, "gsm8k", 0, first)
        scores = record_evaluation(run, "gsm8k", 4, second)
    found = metrics_of(scores)
    assert set(found) == {name for name in definitions.LM_EVAL if "math_verify" not in name}
    assert found["eval/gain_strict_match"] == pytest.approx(2 / 3)
    assert found["eval/gain_strict_match_stderr"] == pytest.approx(1 / 3)


def test_math500_as_minerva_asks_it_and_math_verify_counts_it(policy: Any, tmp_path: Path, brief: None) -> None:
    rows = [("What is $1/2$?", "\\frac{1}{2}"), ("Solve.", "x=5"), ("Where?", "(3, \\pi)"), ("How many?", "7")]
    line = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    file = tmp_path / "math500.jsonl"
    file.write_text("".join(json.dumps({"problem": q + line, "answer": a}) + "\n" for q, a in rows))
    task = spec(compose(["task=math500", f"task.eval_file={file}"]), "task")
    texts = [
        " It is $0.5$.\nFinal Answer: The final answer is $0.5$. I hope it is correct.",
        " Final Answer: The final answer is $5$. I hope it is correct.\n\nProblem:\nNext",
        " $\\boxed{(\\pi, 3)}$",
        " $\\boxed{10^{10^{10}}!}$",  # slow, hence wrong
    ]
    engine = Scripted(policy, texts)
    found = measured(policy, engine, task, tmp_path)
    assert [row["correct"] for row in found.samples] == [True, True, False, False]
    assert [score.metric for score in found.scores] == ["eval/lm_eval_math_verify"]
    assert set(metrics_of(found.scores)) <= set(definitions.LM_EVAL)
    for asked, (question, _) in zip(engine.asked, rows, strict=True):
        *shots, last = re.split(r"\n\nProblem:\n", asked.removeprefix("Problem:\n"))
        assert last == f"{question}\n\nSolution:"
        assert len(shots) == 4
        assert shots[1].startswith("If $\\det \\mathbf{A} = 2$") and "The final answer is $24$. I hope" in shots[1]
    assert found.settings["shots"] == 4


def test_the_copied_examples_are_those_of_the_installed_lm_eval() -> None:
    import lm_eval

    source = (Path(lm_eval.__file__).parent / "tasks" / "minerva_math" / "utils.py").read_text(encoding="utf-8")
    function = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "list_fewshot_samples")
    returned = function.body[-1].value  # type: ignore[attr-defined]
    assert minerva_math500()["fewshot_config"]["samples"] == ast.literal_eval(returned)


def test_other_tasks_are_refused_before_training() -> None:
    evaluator = spec(compose(["eval=lm_eval", "eval.protocol=standard"]), "eval")
    with pytest.raises(ConfigError, match=r"task=gsm8k or task=math500, not task=arithmetic.*eval\.protocol=held_out"):
        evaluator.check(spec(compose([]), "task"))
    with pytest.raises(ConfigError, match=r"eval\.protocol must be one of held_out, standard, got 'mine'"):
        spec(compose(["eval=lm_eval", "eval.protocol=mine"]), "eval")


def test_the_rows_that_lm_eval_sees_are_those_of_the_file() -> None:
    folder = os.environ.get("QERL_DATA")
    if folder is None:
        pytest.skip("QERL_DATA names no folder with the real data files")
    files = {split: Path(folder) / f"gsm8k_{split}.jsonl" for split in ("train", "test")}
    words = [f"task.train_file={files['train']}", f"task.eval_file={files['test']}"]
    task = spec(compose(["task=gsm8k", *words]), "task")
    for split, file in files.items():
        lines = file.read_text(encoding="utf-8").splitlines()
        assert [raw("gsm8k", row) for row in task.rows(split)] == [json.loads(line) for line in lines]
