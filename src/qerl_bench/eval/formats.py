"""Is the model answering at all? Which formats its own completions are in, and what to set so that they count.

A reward reads one format, `task.answer_format`. A model that writes another earns nothing and seems unable, and so does
one that is cut off before it answers. Nothing is sampled for this: the completions are those of the evaluation before
the first step or, without one, of the first step.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qerl_bench.eval.base import Evaluation
from qerl_bench.task.base import Task
from qerl_bench.task.graded import reward_of
from qerl_bench.task.grader.extract import ANSWER_FORMATS
from qerl_bench.task.grader.last_number import last_number_is
from qerl_bench.task.prompt_task import PromptTask
from qerl_core.metrics.compute import mean, repeats_itself
from qerl_core.records import Group, Prompt
from qerl_core.rundir.run_dir import RunDir

FILE = "formats.json"
MODES = ("sampled", "greedy")  # of evaluations; the first is what training does
GAP = 0.05  # between two accuracies, from which on they tell different things
LIMIT = "task.max_completion_tokens"
MOST_CUT = 0.1  # share of completions
Answer = tuple[Prompt, str, bool]  # prompt, completion, whether it is finished

log = logging.getLogger(__name__)


def report(run: RunDir, task: Task, evaluation: Evaluation, step: int) -> None:
    """Of the evaluation before the first step all that `report_formats` says, and of later ones a warning."""
    limit = evaluation.settings.get("max_tokens", task.max_completion_tokens)
    if step > 0:
        warn(task, evaluation, f"step {step}", limit)
        return
    mode, answers = answers_of(task, evaluation)
    report_formats(run, task, answers, f"step 0, {mode}", limit)


def answers_of(task: Task, evaluation: Evaluation) -> tuple[str, list[Answer]]:
    """The mode of an evaluation that is most like training, and its answers; none of one with prompts of its own."""
    for mode in MODES:
        if rows := [row for row in evaluation.samples if row["mode"] == mode]:
            prompts = {prompt.id: prompt for prompt in task.eval_prompts(len({row["question"] for row in rows}))}
            return mode, [(prompts[row["question"]], row["completion"], row["finished"]) for row in rows]
    return "", []


def report_formats(run: RunDir, task: Task, answers: Sequence[Answer], where: str, limit: int) -> None:
    """Say which formats `answers` are in and what to set, and record it in FILE; nothing for a task without formats."""
    if not isinstance(task, PromptTask) or not answers:
        return
    found = {"where": where, **formats_of(task, answers), "max_tokens": limit}
    found["advice"] = advice(found, LIMIT if limit == task.max_completion_tokens else "eval.max_tokens")
    run.write(FILE, json.dumps(found, indent=1))
    log.info(summary_line(found))
    if doubt := doubts(found):
        log.warning("%s: %s", where, "; ".join(doubt))


def report_rollouts(run: RunDir, task: Task, groups: Sequence[Group]) -> None:
    """Say it of the rollouts of step 1, unless an evaluation has."""
    if not (run.path / FILE).exists():
        answers = [(one.prompt, one.text, one.finished) for group in groups for one in group.rollouts]
        report_formats(run, task, answers, "rollouts of step 1", task.max_completion_tokens)


def warn(task: Task, evaluation: Evaluation, where: str, limit: int) -> None:
    """Warn if the strict accuracies of an evaluation say little about what the model can do."""
    values = {score.metric.removeprefix("eval/"): score for score in evaluation.scores}
    for mode in MODES:
        strict, lenient = (values.get(f"{name}_{mode}") for name in ("accuracy", "lenient"))
        if strict is not None and isinstance(task, PromptTask):
            shares = strict.value, lenient and lenient.value, strict.truncated or 0.0
            if doubt := accuracy_doubts(*shares, task.answer_format, limit):
                log.warning("%s, %s: %s", where, mode, "; ".join(doubt))
                return


def formats_of(task: PromptTask, answers: Sequence[Answer]) -> dict[str, Any]:
    """For each format the share of `answers` that have an answer in it, and that would be right: shares of all.

    `truncated` were cut off, `repeating` too and had begun to repeat themselves.
    """
    formats = {}
    for name in ANSWER_FORMATS:
        reader = replace(task, answer_format=name)
        rewards = [reward_of(reader, prompt, text, finished) for prompt, text, finished in answers]
        formats[name] = {
            "found": mean([float(reward.answer is not None) for reward in rewards]),
            "right": mean([float(reward.correct) for reward in rewards]),
        }
    lenient = [last_number_is(prompt.answer, text, finished) for prompt, text, finished in answers]
    return {
        "completions": len(answers),
        "answer_format": task.answer_format,
        "instruction": task.instruction,
        "formats": formats,
        "lenient": None if None in lenient else mean([float(right or 0) for right in lenient]),
        "truncated": mean([float(not finished) for *_, finished in answers]),
        "repeating": mean([float(not finished and repeats_itself(text.split())) for _, text, finished in answers]),
    }


def advice(measured: Mapping[str, Any], limit: str = LIMIT) -> dict[str, Any]:
    """The options to set: a format that reads more of these answers, and a larger `limit`.

    No other limit if most of what was cut off repeats itself, and would not end.
    """
    formats, asked = measured["formats"], measured["answer_format"]
    singles = [asked, *(name for name in formats if name != "auto")]  # of equals the first
    best = max(singles, key=lambda name: (formats[name]["right"], formats[name]["found"]))
    best = "auto" if formats["auto"]["right"] > formats[best]["right"] + GAP else best
    more = {key: formats[best][key] - formats[asked][key] for key in ("right", "found")}
    options: dict[str, Any] = {}
    if more["right"] > GAP or (more["right"] >= 0 and more["found"] > 0.5):
        options["task.answer_format"] = best
    elif formats[best]["found"] < 0.5 and (measured["lenient"] or 0) > formats[best]["right"] + GAP:
        options |= {} if measured["instruction"] == "suffix" else {"task.instruction": "suffix"}  # nothing is marked
    if measured["truncated"] > MOST_CUT and 2 * measured["repeating"] < measured["truncated"]:
        options[limit] = (4 if measured["truncated"] > 0.5 else 2) * measured["max_tokens"]
    return options


def summary_line(measured: Mapping[str, Any]) -> str:
    """Which formats are used, each with what would be right in it: one line."""
    asked = measured["answer_format"]
    used = {
        name: one for name, one in measured["formats"].items() if name == asked or (one["found"] and name != "auto")
    }
    shares = [f"{one['found']:.0%} in {name} ({one['right']:.1%} right)" for name, one in used.items()]
    lenient = "" if measured["lenient"] is None else f"; {measured['lenient']:.1%} right by their last number (lenient)"
    return (
        f"{measured['where']}, formats of {measured['completions']} answers: {', '.join(shares)}{lenient}; "
        f"{measured['truncated']:.0%} cut off at {measured['max_tokens']} tokens"
    )


def doubts(measured: Mapping[str, Any]) -> list[str]:
    """Why the strict accuracy says little about what the model can do, and what to try; empty if it says enough."""
    asked, options = measured["answer_format"], measured["advice"]
    strict = measured["formats"][asked]
    lines = accuracy_doubts(strict["right"], measured["lenient"], measured["truncated"], asked, measured["max_tokens"])
    if not lines and options:
        lines = [f"only {strict['found']:.0%} of the answers are in task.answer_format={asked}"]
    if measured["truncated"] > MOST_CUT and 2 * measured["repeating"] >= measured["truncated"]:
        lines.append("most of these repeat themselves, and a larger limit would not end them")
    return [*lines, *(["try " + " ".join(f"{key}={value}" for key, value in options.items())] if options else [])]


def accuracy_doubts(strict: float, lenient: float | None, truncated: float, asked: str, limit: int) -> list[str]:
    """What tells learning the format from learning the task, in words: a gap to the lenient accuracy, and cuts."""
    lines = []
    if lenient is not None and abs(lenient - strict) > GAP:
        lines.append(f"{strict:.1%} are right in task.answer_format={asked}, {lenient:.1%} by their last number")
    if truncated > MOST_CUT:
        lines.append(f"{truncated:.0%} are cut off at {limit} tokens")
    return lines
