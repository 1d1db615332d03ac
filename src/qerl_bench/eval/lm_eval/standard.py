"""eval=lm_eval eval.protocol=standard: GSM8K and MATH-500 as lm-eval asks them, to compare with published numbers.

Prompts, worked examples, stop strings, token limit (256) and counting are lm-eval's own; only the rows come from the
task, so that no network is needed, and the answers from our engine. Not the numbers of eval=task: there is no chat
template and no instruction, and a lenient reader counts.

    gsm8k    5 worked examples from the train split; strict_match reads the number behind ####, flexible_extract the
             last number
    math500  minerva_math500: 4 worked examples; math_verify compares whatever answer it finds in the text

Left out: exact_match of minerva_math500, which needs an antlr that Hydra excludes. That is also why its module cannot
be imported here, and its examples are read from its source.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_bench.checks import ConfigError
from qerl_bench.rundir import write_atomically

if TYPE_CHECKING:
    from qerl_bench.task.dataset import Questions
    from qerl_bench.task.sources import Row

SHOTS_SEED = 1234  # lm-eval's default for drawing the worked examples


@dataclass(frozen=True)
class Benchmark:
    """A task of lm-eval, and what it calls a right answer: (filter, metric) of its samples for each of our modes."""

    task: str
    counted: dict[str, tuple[str, str]]


BENCHMARKS = {
    "gsm8k": Benchmark(
        "gsm8k",
        {"strict_match": ("strict-match", "exact_match"), "flexible_extract": ("flexible-extract", "exact_match")},
    ),
    "math500": Benchmark("minerva_math500", {"math_verify": ("none", "math_verify")}),
}


def benchmark_of(name: str) -> Benchmark:
    """Raises ConfigError for a task that lm-eval's published numbers do not cover here."""
    if name not in BENCHMARKS:
        raise ConfigError(
            f"eval.protocol=standard measures what lm-eval has: task={' or task='.join(BENCHMARKS)}, not task={name}. "
            "Use eval.protocol=held_out, or evaluate the finished run on it: qerl-bench eval RUN_DIR "
            "eval=lm_eval eval.protocol=standard task=gsm8k"
        )
    return BENCHMARKS[name]


def write_benchmark(folder: Path, task: Questions, questions: int | None) -> list[str]:
    """Write rows and lm-eval task of `task` to `folder`; returns the ids of the questions, in order."""
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    described = gsm8k() if task.name == "gsm8k" else minerva_math500()
    rows = {"test": task.rows("test")[:questions]}
    if task.name == "gsm8k":
        rows["train"] = task.rows("train")
    files = {split: folder / f"{described['task']}_{split}.jsonl" for split in rows}
    for split, file in files.items():
        write_atomically(file, "".join(json.dumps(raw(task.name, row)) + "\n" for row in rows[split]))
    described |= {"dataset_path": "json", "dataset_kwargs": {"data_files": {k: v.name for k, v in files.items()}}}
    local = "class: !function qerl_bench.eval.lm_eval.task.Standard\n"
    write_atomically(folder / f"{described['task']}.yaml", local + yaml.safe_dump(described, sort_keys=False))
    return [f"{task.name}/test/{row.line}" for row in rows["test"]]


def raw(name: str, row: Row) -> dict[str, str]:
    """A row with the columns of the data set that lm-eval expects."""
    if name == "gsm8k":
        return {"question": row.question, "answer": row.answer}
    return {"problem": row.question, "answer": row.gold}


def gsm8k() -> dict[str, Any]:
    """lm-eval's own description of the task, without the place of its data."""
    import yaml

    described = yaml.safe_load((shipped() / "gsm8k" / "gsm8k.yaml").read_text())
    return {key: value for key, value in described.items() if key not in ("tag", "dataset_path", "dataset_name")}


def minerva_math500() -> dict[str, Any]:
    """lm-eval's minerva_math500 (version 3.1), counted by math-verify alone."""
    return {
        "task": "minerva_math500",
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "Problem:\n{{problem}}\n\nSolution:",
        "doc_to_target": "{{answer if few_shot is undefined else solution}}",
        "num_fewshot": 4,
        "fewshot_config": {"sampler": "first_n", "samples": worked_examples()},
        "generation_kwargs": {"until": ["Problem:"], "do_sample": False, "temperature": 0},
        "metric_list": [{"metric": "math_verify", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 3.1},
    }


def worked_examples() -> list[dict[str, str]]:
    """What list_fewshot_samples of lm-eval's minerva_math returns, taken from its source."""
    source = ast.parse((shipped() / "minerva_math" / "utils.py").read_text())
    for node in source.body:
        if isinstance(node, ast.FunctionDef) and node.name == "list_fewshot_samples":
            returned = node.body[-1]
            assert isinstance(returned, ast.Return) and returned.value is not None
            return ast.literal_eval(returned.value)
    raise ConfigError(
        "the installed lm-eval has no worked examples of minerva_math; use the version in constraints.txt"
    )


def shipped() -> Path:
    """The folder of lm-eval's own tasks."""
    import lm_eval

    return Path(lm_eval.__file__).parent / "tasks"
