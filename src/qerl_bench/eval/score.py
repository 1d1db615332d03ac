"""`python -m qerl_bench.eval.score task=gsm8k completions=FILE.jsonl out=DIR`: judge completions made elsewhere.

So that the judge can be held against other people's labels. Every line of FILE is an object with `completion` and
either `id` (as samples.parquet has it under `question`) or `question` (its text; case, spacing and punctuation make no
difference where that leaves one question), and a number `sample` if a question is completed several times. Any task=...
and task.<key>=... of a run can stand beside it. DIR gets scores.jsonl, a line for each completion, and totals.json.
Neither torch nor, with task.eval_file=..., a network is needed.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from qerl_bench.checks import ConfigError, require
from qerl_bench.cli import exit_code, options
from qerl_bench.config import compose, spec
from qerl_bench.metrics import mean
from qerl_bench.records import Prompt
from qerl_bench.rundir import write_atomically
from qerl_bench.statistics import over_samples
from qerl_bench.task.base import Task
from qerl_bench.task.datafile import read_rows

USAGE = "usage: python -m qerl_bench.eval.score task=gsm8k [task.<key>=...] completions=FILE.jsonl out=DIR"


def main(argv: list[str]) -> None:
    words, chosen = options(argv, ("completions", "out"), USAGE)
    other = [word for word in words if not word.lstrip("+").startswith(("task=", "task."))]
    require(not other, f"scoring depends on the task alone, not on {' '.join(other)}; {USAGE}")
    task: Task = spec(compose(words), "task")
    rows = judged(task, chosen["completions"])
    found = totals(task, rows) | {"options": words}
    out = Path(chosen["out"])
    require(not out.is_file(), f"out={out} is a file; give a folder")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "scores.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_atomically(out / "totals.json", json.dumps(found, indent=1))
    print(
        f"{found['completions']} completions of {found['questions']} questions, {found['unscored']} of the task "
        f"without one: accuracy {found['accuracy']:.4f} +- {found['stderr']:.4f}, no answer found in "
        f"{found['format_failed']:.1%}\n{out / 'scores.jsonl'}\n{out / 'totals.json'}"
    )


def judged(task: Task, file: str) -> list[dict[str, Any]]:
    """One row for each line of `file`: what it answers, whether that is right, and every column of the reward.

    Raises ConfigError, naming the line, for a key that is missing, a question that is none or several of the task's
    held-out ones, and a completion that is there twice.
    """
    prompts = task.eval_prompts(None)
    by_id = {prompt.id: prompt for prompt in prompts}
    by_question: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        for text in {prompt.question, task.normalised(prompt.question)}:
            by_question[text].append(prompt)
    lines: dict[tuple[str, int], int] = {}
    rows = []
    for line, given in enumerate(read_rows(file), start=1):
        where = f"{file}, line {line}"
        prompt = _prompt(given, by_id, by_question, f"{where}: ", task)
        text, sample = given.get("completion"), given.get("sample", 0)
        require(isinstance(text, str), f"{where}: the key 'completion' must be there and hold text; {_has(given)}")
        require(type(sample) is int and sample >= 0, f"{where}: sample must be a whole number from 0, got {sample!r}")
        earlier = lines.setdefault((prompt.id, sample), line)
        require(
            earlier == line,
            f"{where}: {prompt.id} is completed on line {earlier} already; keep one of the two, or give several "
            "completions of a question a different 'sample' each: 0, 1, ...",
        )
        reward = task.reward(prompt, str(text))
        rows.append(
            {
                "line": line,
                "id": prompt.id,
                "sample": sample,
                "gold": prompt.answer,
                "answer": reward.answer,
                **reward.parts,
                "reward": reward.total,
            }
        )
    return rows


def totals(task: Task, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over questions of the means over samples, and what they are of. Only a full score counts as right."""
    by_question: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_question[row["id"]].append(row)
    estimate = over_samples([[float(row["correct"] == 1) for row in group] for group in by_question.values()])
    columns = [key for key in rows[0] if key not in ("line", "id", "sample", "gold", "answer")]
    return {
        "task": task.name,
        "completions": len(rows),
        "questions": estimate.n,
        "unscored": len(task.eval_prompts(None)) - estimate.n,
        "accuracy": estimate.value,
        "stderr": estimate.stderr,
        "stderr_questions": estimate.stderr_questions,
        "stderr_sampling": estimate.stderr_sampling,
        "format_failed": mean([float(row["answer"] is None) for row in rows]),
        "means": {key: mean([row[key] for row in rows]) for key in columns},  # over completions
    }


def _prompt(
    given: dict[str, Any], by_id: dict[str, Prompt], by_question: dict[str, list[Prompt]], where: str, task: Task
) -> Prompt:
    for key in ("id", "question"):
        if given.get(key) is None:
            continue
        value = str(given[key])
        if key == "id":
            found = [by_id[value]] if value in by_id else []
        else:
            found = by_question.get(value) or by_question.get(task.normalised(value)) or []
        require(
            bool(found),
            f"{where}{key} {value[:80]!r} is none of the {len(by_id)} held-out questions of task={task.name}; their "
            f"ids are {next(iter(by_id))!r} and so on, and task.eval_file=FILE reads other questions",
        )
        require(
            len(found) == 1,
            f"{where}by its letters and digits, question {value[:80]!r} is any of {len(found)} held-out questions "
            f"({', '.join(repr(prompt.id) for prompt in found[:3])}); give the 'id' of the one that is meant",
        )
        return found[0]
    raise ConfigError(f"{where}the key 'id' or 'question' must say what is completed; {_has(given)}")


def _has(given: dict[str, Any]) -> str:
    return f"the line has {', '.join(map(repr, given)) or 'no keys'}"


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:]), "stopped; nothing was written"))
