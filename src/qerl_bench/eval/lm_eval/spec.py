"""eval=lm_eval: questions through lm-eval, the harness that published numbers come from.

lm-eval asks and counts; our engine answers, with the policy that is trained. With eval.protocol=held_out it asks the
task's held-out questions and the task's strict reward judges, so the accuracy is the greedy one of eval=task to the
question; eval.protocol=standard asks lm-eval's own benchmarks (lm_eval_standard.py). What was asked is left in the
folder of the record as JSONL files and a task YAML. Left out: lm-eval's `simple_evaluate`, which reseeds every global
random generator.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_bench.checks import require, require_count, require_package
from qerl_bench.engine.adapter_check import check_completions
from qerl_bench.eval.base import Evaluation
from qerl_bench.eval.lm_eval.standard import SHOTS_SEED, benchmark_of, write_benchmark
from qerl_bench.eval.task import accuracy, asked, judge, scored
from qerl_bench.records import Prompt, Rollout
from qerl_bench.rundir import write_atomically
from qerl_bench.task.base import Task

if TYPE_CHECKING:
    from qerl_bench.engine.base import RolloutEngine
    from qerl_bench.model.policy import Policy
    from qerl_bench.rundir import RunDir

PROTOCOLS = ("held_out", "standard")
DEFAULT_TOKENS = 256  # lm-eval's limit where a task sets none
INVALID = "[invalid]"  # what lm-eval's filters leave of a text without an answer
TASK_VERSION = 1  # of the task that lm-eval sees: raise it when prompts, limits or judgement change their meaning


@dataclass(frozen=True, kw_only=True)
class LMEval:
    """Greedy accuracy, measured through lm-eval."""

    name: str
    protocol: str
    questions: int | None

    def __post_init__(self) -> None:
        require(
            self.protocol in PROTOCOLS,
            f"eval.protocol must be one of {', '.join(PROTOCOLS)}, got {self.protocol!r}",
        )
        if self.questions is not None:
            require_count("eval.questions", self.questions)

    def check(self, task: Task) -> None:
        """Raise ConfigError unless lm-eval is installed and, for the standard protocol, has this task, and unless the task
        has so many held-out questions."""
        require_package("lm_eval", "eval=lm_eval", "eval")
        if self.protocol == "standard":
            benchmark_of(task.name)
        task.eval_prompts(self.questions)

    def evaluate(self, policy: Policy, engine: RolloutEngine, task: Task, run: RunDir, seed: int) -> Evaluation:
        folder = (run.path / "lm_eval").resolve()
        measure = standard if self.protocol == "standard" else held_out
        return measure(policy, engine, task, folder, self.questions)


def held_out(policy: Policy, engine: RolloutEngine, task: Task, folder: Path, questions: int | None) -> Evaluation:
    """The task's own questions, asked as in training and judged by its reward."""
    prompts = task.eval_prompts(questions)
    write_task(folder, task, prompts, policy)
    found, answered = through_lm_eval(policy, engine, folder, task.name)
    rollouts = [replace(rollout, prompt=prompt) for prompt, rollout in zip(prompts, answered, strict=True)]
    rows = judge(task, rollouts, "greedy")
    prompt_ids = [policy.prompt_ids(prompt.messages) for prompt in prompts]
    assert [rollout.prompt_ids for rollout in rollouts] == prompt_ids, "lm-eval changed the prompts"
    counted = {sample["doc"]["id"]: bool(sample["correct"]) for sample in found["samples"][task.name]}
    assert counted == {row["question"]: row["correct"] for row in rows}, "lm-eval judged other answers"
    settings = settings_of(found, task.name, task.max_completion_tokens) | check_completions(policy, rollouts)
    return Evaluation(scores=scored(rows, "greedy", 1, 1), samples=rows, settings=settings)


def standard(policy: Policy, engine: RolloutEngine, task: Task, folder: Path, questions: int | None) -> Evaluation:
    """A benchmark of lm-eval, asked and counted as it does; a mode for each way in which it counts."""
    benchmark = benchmark_of(task.name)
    ids = write_benchmark(folder, task, questions)  # type: ignore[arg-type] # only data sets have these names
    found, rollouts = through_lm_eval(policy, engine, folder, benchmark.task)
    rows, scores = [], []
    for mode, (by_filter, metric) in benchmark.counted.items():
        samples = [sample for sample in found["samples"][benchmark.task] if sample["filter"] == by_filter]
        samples.sort(key=lambda sample: sample["doc_id"])
        judged = [
            {
                **asked(mode, Prompt(id=id, messages=(), answer=sample["target"]), 0),
                "correct": bool(sample[metric]),
                "answer": None if sample["filtered_resps"][0] == INVALID else sample["filtered_resps"][0],
                "completion": rollout.text,
                "tokens": len(rollout.token_ids),
                "finished": rollout.finished or sample["resps"][0][0] != rollout.text,  # or came to a stop string
            }
            for id, sample, rollout in zip(ids, samples, rollouts, strict=True)
        ]
        rows += judged
        scores.append(accuracy(f"eval/lm_eval_{mode}", judged, 1))
    settings = settings_of(found, benchmark.task, DEFAULT_TOKENS) | check_completions(policy, rollouts)
    return Evaluation(scores=scores, samples=rows, settings=settings)


def through_lm_eval(policy: Policy, engine: RolloutEngine, folder: Path, name: str) -> tuple[Any, list[Rollout]]:
    """What lm-eval reports for the task in `folder`, and the completions, one for each question."""
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    from qerl_bench.eval.lm_eval.model import EngineLM

    tasks = TaskManager(include_path=folder, include_defaults=False).load([name])
    tasks["tasks"][name].set_fewshot_seed(SHOTS_SEED)
    lm = EngineLM(policy, engine)
    return evaluate(lm, tasks, bootstrap_iters=0), lm.rollouts


def settings_of(found: Any, name: str, max_tokens: int) -> dict[str, Any]:
    return {
        "samples": 1,
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "shots": found["n-shot"][name],
        "lm_eval": metadata.version("lm_eval"),
        "lm_eval_task": name,
        "task_version": found["versions"][name],
    }


def write_task(folder: Path, task: Task, prompts: list[Prompt], policy: Policy) -> None:
    """Write the questions to `folder`/<task>.jsonl and their lm-eval task to `folder`/<task>.yaml."""
    import yaml

    data = folder / f"{task.name}.jsonl"
    texts = [policy.prompt_text(prompt.messages) for prompt in prompts]
    rows = [
        {"id": prompt.id, "text": text, "messages": prompt.messages, "gold": prompt.answer}
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    mean = {"aggregation": "mean", "higher_is_better": True}
    folder.mkdir(exist_ok=True)
    write_atomically(data, "".join(json.dumps(row) + "\n" for row in rows))
    described = {
        "task": task.name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": data.name}},  # beside the YAML: run folders may be moved
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "text",
        "doc_to_target": "gold",
        "num_fewshot": 0,
        "generation_kwargs": {"do_sample": False, "max_gen_toks": task.max_completion_tokens, "until": []},
        "metric_list": [{"metric": "correct", **mean}, {"metric": "reward", **mean}],
        "metadata": {"version": TASK_VERSION, "judge": spec_of(task)},
    }
    judged_by = "class: !function qerl_bench.eval.lm_eval.task.HeldOut\n"
    write_atomically(folder / f"{task.name}.yaml", judged_by + yaml.safe_dump(described, sort_keys=False))


def spec_of(spec: Any) -> dict[str, Any]:
    """The config node that a spec was made from, with those of the specs inside it."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    node = {key: spec_of(value) if is_dataclass(value) else value for key, value in values.items()}
    return {"_target_": f"{type(spec).__module__}.{type(spec).__qualname__}", **node}
