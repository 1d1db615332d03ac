"""Grade completions made elsewhere.

This allows comparing the grader with other people's labels. Each line of FILE is an object with `completion`, either
`id` (the column `question` of samples.parquet) or `question` (its text; case, spacing and punctuation are ignored
unless that makes it ambiguous), a number `sample` if a question has several completions, and `finished` false if it was
cut off (or the `finish_reason` of a server, stop or length). Any task=... and task.<key>=... of a run may be given. DIR
gets scores.jsonl, one line per completion, and totals.json. Needs no torch and, with task.eval_file=..., no network.
"""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from qerl_bench.config import compose, spec
from qerl_bench.eval.base import with_error
from qerl_bench.task.base import Task, held_out
from qerl_bench.task.datafile import read_rows
from qerl_bench.task.dataset import DatasetTask
from qerl_bench.task.graded import reward_of
from qerl_bench.task.grader.last_number import last_number_is
from qerl_bench.task.prompt_task import PromptTask
from qerl_core.checks import ConfigError, require
from qerl_core.metrics.compute import mean
from qerl_core.process.arguments import split_words
from qerl_core.records import Prompt
from qerl_core.rundir.durable import write_atomically
from qerl_core.statistics import over_samples

ENDS = {"stop": True, "eos_token": True, "stop_sequence": True, "length": False}  # of vLLM, OpenAI's API and TGI
USAGE = "usage: qerl-bench score task=gsm8k [task.<key>=...] completions=FILE.jsonl out=DIR"


def main(argv: list[str]) -> None:
    words, chosen = split_words(argv, ("completions", "out"), USAGE)
    ignored = [word for word in words if not word.lstrip("+").startswith(("task=", "task.", "hydra.searchpath="))]
    require(not ignored, f"scoring depends only on the task, not on {' '.join(ignored)}; {USAGE}")
    task: Task = spec(compose(words), "task")
    rows = grade_file(task, chosen["completions"])
    result: dict[str, Any] = totals(task, rows) | {"options": words}
    out = Path(chosen["out"])
    require(not out.is_file(), f"out={out} is a file; give a folder")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "scores.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_atomically(out / "totals.json", json.dumps(result, indent=1))
    lenient = "" if result["lenient"] is None else f"lenient {result['lenient']:.4f}, "
    print(
        f"{result['completions']} completions of {result['questions']} questions, {result['unscored']} of the task "
        f"without one: accuracy {with_error(result['accuracy'], result['stderr'], '.4f')}, {lenient}no answer found in "
        f"{result['format_failed']:.1%}\n{out / 'scores.jsonl'}\n{out / 'totals.json'}"
    )


def grade_file(task: Task, file: str) -> list[dict[str, Any]]:
    """One row for each line of `file`: its answer and every part of its reward.

    Raises ConfigError, with the line number, for a missing key, a question that matches no held-out question of the
    task or several, and a repeated completion.
    """
    prompts = held_out(task, None)
    by_id = {prompt.id: prompt for prompt in prompts}
    by_id |= {id: by_id[first] for id, first in _copies(task).items()}
    by_question = {task.normalize(prompt.question): prompt for prompt in prompts if prompt.question}
    by_question |= {prompt.question: prompt for prompt in prompts if prompt.question}
    places: dict[tuple[str, int], str] = {}
    lenient = isinstance(task, PromptTask)
    rows = []
    for place, entry in read_rows(file).items():
        where = f"{file}, {place}"
        entry = _from_text(entry) if file.lower().endswith(".csv") else entry
        prompt = _prompt(entry, by_id, by_question, f"{where}: ", task)
        id = str(entry.get("id") or prompt.id)
        text, sample, finished = entry.get("completion"), entry.get("sample", 0), _finished(entry, where)
        require(isinstance(text, str), f"{where}: the key 'completion' must hold text; {_keys(entry)}")
        require(type(sample) is int and sample >= 0, f"{where}: sample must be a whole number from 0, got {sample!r}")
        require(
            isinstance(finished, bool),
            f"{where}: finished must be true, or false for a completion that was cut off, got {finished!r}",
        )
        earlier = places.setdefault((id, sample), place)
        require(
            earlier == place,
            f"{where}: {id} is already completed on {earlier}; keep one of the two, or give each "
            "completion of a question a different 'sample': 0, 1, ...",
        )
        reward = reward_of(task, prompt, str(text), finished)
        rows.append(
            {
                "line": int(place.split()[1]),
                "id": id,
                "sample": sample,
                "gold": prompt.answer,
                "answer": reward.answer,
                **reward.parts,
                "reward": reward.total,
                **({"lenient": last_number_is(prompt.answer, str(text), finished)} if lenient else {}),
            }
        )
    return rows


def totals(task: Task, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy (mean over questions of the mean over samples), its errors and counts. Only a full score is right."""
    copies = _copies(task)  # whose completions are further samples of one question
    by_question: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        id = str(row["id"])
        by_question[copies.get(id, id)].append(row)
    estimate = over_samples([[float(row["correct"] == 1) for row in group] for group in by_question.values()])
    columns = [key for key in rows[0] if key not in ("line", "id", "sample", "gold", "answer", "lenient")]
    lenient = None  # for a task without an answer format, or with answers that are no numbers
    if all(row.get("lenient") is not None for row in rows):
        lenient = over_samples([[float(row["lenient"]) for row in group] for group in by_question.values()]).value
    return {
        "task": task.name,
        "completions": len(rows),
        "questions": estimate.n,
        "unscored": len(task.eval_prompts(None)) - estimate.n,
        "accuracy": estimate.value,
        "stderr": estimate.known_stderr,
        "stderr_questions": estimate.stderr_questions,
        "stderr_sampling": estimate.stderr_sampling,
        "lenient": lenient,
        "format_failed": mean([float(row["answer"] is None) for row in rows]),
        "means": {key: mean([row[key] for row in rows]) for key in columns},  # over completions
    }


def _from_text(entry: dict[str, Any]) -> dict[str, Any]:
    """A row of CSV, whose values are text, with numbers and true or false read; what is empty is missing."""
    row = {key: value for key, value in entry.items() if value or key == "completion"}
    for key in row.keys() & {"sample", "finished"}:
        with suppress(ValueError, RecursionError):
            row[key] = json.loads(row[key].lower())
    return row


def _finished(entry: dict[str, Any], where: str) -> Any:
    """Whether the completion ended, as `finished` says or else the servers' `finish_reason`."""
    reason = entry.get("finish_reason")
    if "finished" in entry or reason is None:
        return entry.get("finished", True)
    require(
        isinstance(reason, str) and reason in ENDS,
        f"{where}: finish_reason must be {', '.join(ENDS)}, got {reason!r}; say finished, true or false, in its place",
    )
    return ENDS[reason]


def _copies(task: Task) -> dict[str, str]:
    return task.copies() if isinstance(task, DatasetTask) else {}


def _prompt(
    entry: dict[str, Any], by_id: dict[str, Prompt], by_question: dict[str, Prompt], where: str, task: Task
) -> Prompt:
    for key in ("id", "question"):
        if entry.get(key) is None:
            continue
        value = str(entry[key])
        found = by_id.get(value) if key == "id" else by_question.get(value) or by_question.get(task.normalize(value))
        if found is not None:
            asked = entry.get("question")
            require(
                key == "question" or asked is None or task.normalize(str(asked)) == task.normalize(found.question),
                f"{where}{value} is another question in this task, {found.question[:60]!r}, than {str(asked)[:60]!r}: "
                "the rows of another file, or in another order; leave id or question out",
            )
            return found
        raise ConfigError(
            f"{where}{key} {value[:80]!r} is none of the {len(by_id)} held-out questions of task={task.name}; their "
            f"ids are {next(iter(by_id))!r} and so on, and task.eval_file=FILE reads other questions"
        )
    raise ConfigError(f"{where}the key 'id' or 'question' must name the question; {_keys(entry)}")


def _keys(entry: dict[str, Any]) -> str:
    return f"the line has {', '.join(map(repr, entry)) or 'no keys'}"
