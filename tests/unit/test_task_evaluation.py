"""eval=task judged by a scripted engine: whoever writes the gold solutions gets 1.0, whoever mixes them up about 0."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from qerl_bench.config import compose, spec
from qerl_bench.engine.base import Sampling
from qerl_bench.eval.base import Evaluation
from qerl_core.records import Prompt, Rollout

ASSET = Path(__file__).resolve().parents[1] / "assets" / "gsm8k_tiny.jsonl"


class ScriptedEngine:
    """Answers each prompt with the text that a script gives for its id."""

    def __init__(self, script: dict[str, str]) -> None:
        self.script = script

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Rollout]:
        return [
            Rollout(
                prompt=prompt,
                sample=sample,
                prompt_ids=[1],
                token_ids=[2],
                logprobs=[0.0],
                entropies=[0.0],
                text=self.script[prompt.id],
                finished=True,
            )
            for prompt in prompts
            for sample in range(sampling.samples)
        ]

    def close(self) -> None:
        """Holds nothing."""


def gsm8k(train: Path, test: Path):
    return spec(compose(["task=gsm8k", f"task.train_file={train}", f"task.eval_file={test}"]), "task")


def evaluation_by(script: dict[str, str], task, samples: int = 2) -> Evaluation:
    evaluator = spec(compose(["eval=task", "eval.questions=null", f"eval.samples={samples}"]), "eval")
    policy = SimpleNamespace(adapter=None)
    return evaluator.evaluate(policy, ScriptedEngine(script), task, None, 0)


def completion(solution: str) -> str:
    """A gold solution in the tags that the prompt asks for."""
    thought, gold = solution.split("####")
    return f"<think>{thought}</think><answer>{gold.strip()}</answer>"


def assert_scores(task, rows: list[dict[str, str]]) -> tuple[float, float]:
    prompts = task.eval_prompts(None)
    texts = [completion(row["answer"]) for row in rows]
    right = evaluation_by({p.id: text for p, text in zip(prompts, texts, strict=True)}, task)
    wrong = evaluation_by({p.id: text for p, text in zip(prompts, texts[1:] + texts[:1], strict=True)}, task)
    for evaluation in (right, wrong):
        assert [score.metric for score in evaluation.scores] == [
            *("eval/accuracy_greedy", "eval/lenient_greedy"),
            *("eval/accuracy_sampled", "eval/lenient_sampled", "eval/majority", "eval/pass_at_k"),
        ]
        assert {score.n for score in evaluation.scores} == {len(rows)}
        assert len(evaluation.samples) == 3 * len(rows)
    assert [score.value for score in right.scores] == [1.0] * 6
    assert [score.stderr for score in right.scores] == [0.0] * 6
    assert [score.format_failed for score in right.scores] == [0.0, None, 0.0, None, None, None]
    greedy, *others = (score.value for score in wrong.scores)
    assert others == [greedy] * 5
    assert wrong.scores[0].stderr == pytest.approx((greedy * (1 - greedy) / (len(rows) - 1)) ** 0.5)
    return right.scores[0].value, greedy


def test_gold_solutions_score_one_and_shifted_ones_zero(tmp_path):
    from qerl_bench.task.datafile import read_rows

    rows = [*read_rows(str(ASSET)).values()]
    train = tmp_path / "train.jsonl"
    train.write_text('{"question": "What is one and one?", "answer": "1+1=2\\n#### 2"}\n')
    task = gsm8k(train, ASSET)
    _, shifted = assert_scores(task, rows)
    assert shifted == 0


def test_the_official_test_set_scores_one_and_shifted_about_zero():
    folder = os.environ.get("QERL_DATA")
    if folder is None:
        pytest.skip("set QERL_DATA to a folder with gsm8k_train.jsonl and gsm8k_test.jsonl")
    from qerl_bench.task.datafile import read_rows

    test = Path(folder) / "gsm8k_test.jsonl"
    rows = [*read_rows(str(test)).values()]
    assert len(rows) == 1319
    _, shifted = assert_scores(gsm8k(Path(folder) / "gsm8k_train.jsonl", test), rows)
    assert shifted == 15 / 1319  # neighbours whose answers are truly equal
