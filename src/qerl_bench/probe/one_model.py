"""Measures one model in answer formats and weight formats, one policy in memory beside the first."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from qerl_bench.engine.base import RolloutEngine
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model.digest import digest_of, name_of_base
from qerl_bench.model.gguf.convert import record_of, rounding_notice
from qerl_bench.model.policy import Policy
from qerl_bench.model_setup import base_checkpoint, build_policy
from qerl_bench.probe.answers import AnswerSet, numbers, table
from qerl_bench.probe.contamination import contamination, questions
from qerl_bench.probe.measure import ProbePlan, Reference, answers_of, measure
from qerl_bench.probe.parts import Parts, kept_answers
from qerl_bench.probe.rise import sigma_of_rise
from qerl_bench.run_setup import prepare_device
from qerl_bench.task.base import Task
from qerl_bench.task.grader.extract import ANSWER_FORMATS
from qerl_bench.task.prompt_task import PromptTask
from qerl_core.checks import require
from qerl_core.process.progress import phase
from qerl_core.rundir.environment import environment
from qerl_core.rundir.stops import note_at_stop
from qerl_studies.probes.page import so_far

log = logging.getLogger(__name__)
ANSWER_FORMAT_QUESTIONS = 64  # to choose the answer format, at most
CURVE_PROMPTS = 32  # of a curve of noise, at most
WHOLE = "measured"  # the part of a weight format that has all its numbers
UNTOLD = ("metrics", "argv")  # of the environment
DOSE_PROMPTS, DOSE_DRAWS = 8, 4  # of the search for a rise: draws of noise differ by more than prompts do


def runnable(experiments: dict[str, Experiment]) -> dict[str, Experiment]:
    """Those whose weight format can run here; the others get a line. Raises ConfigError if none can."""
    reasons: dict[str, str] = {}
    for quant, experiment in experiments.items():
        try:
            device = prepare_device(experiment.device, experiment.quant)
            experiment.engine.check(device, experiment.quant)
        except ValueError as error:
            reasons[quant] = str(error)
            log.info("left out: %s", error)
    require(len(reasons) < len(experiments), "; ".join(reasons.values()))
    return {quant: one for quant, one in experiments.items() if quant not in reasons}


def probe(
    experiments: dict[str, Experiment], options: Any, chosen: bool, out: Path
) -> tuple[dict[str, Any], pa.Table, Parts]:
    """The record, the answers, and the parts in `out` that both are of, to be deleted when both are written.

    The answer format is the best of those asked in, unless it was `chosen`.
    """
    first = next(iter(experiments.values()))
    device = prepare_device(first.device, first.quant)
    log.info(to_ask(experiments, options))
    base = base_checkpoint(first.model, first.task, first.root)
    if (origin := record_of(base)) and (rounded := rounding_notice(origin)):
        log.info(rounded)
    digest = digest_of(first.model, base)
    completed = questions(first.task, options.contamination)
    asked = experiments, probe_options(options), chosen, digest, probe_plan(options).prompts_of(first.task), completed
    parts = Parts(out, repr(asked))
    with note_at_stop(parts.stop_line):
        probing = Probing(experiments, options, chosen, base, device, parts)
        record = {
            "model": name_of_base(first.model),
            "digest": digest,
            "file": origin,
            "task": first.task.name,
            "group": first.rollout.group_size,
            "max_completion_tokens": first.task.max_completion_tokens,
            "options": probe_options(options),
            "started": parts("started", now),
            "environment": {key: value for key, value in environment(device).items() if key not in UNTOLD},
        }
        rows = probing.fill(record, completed)
    return record | {"ended": now()}, rows, parts


class Probing:
    """One probe that goes on: what it measures, and what later formats need of the first."""

    def __init__(
        self,
        experiments: dict[str, Experiment],
        options: Any,
        chosen: bool,
        base: Path | None,
        device: str,
        parts: Parts,
    ) -> None:
        self.experiments, self.options, self.chosen = experiments, options, chosen
        self.base, self.device, self.parts = base, device, parts
        self.first = next(iter(experiments.values()))
        self.best: str | None = getattr(self.first.task, "answer_format", None)
        if self.best is not None and not chosen and len(options.answer_formats or ()) == 1:
            (self.best,) = options.answer_formats  # there is nothing to compare
        self.reference = Reference()

    def fill(self, record: dict[str, Any], completed: Mapping[str, Sequence[str]]) -> pa.Table:
        """Complete `record`, and write the page of what is known after each part. Returns all answers.

        `completed` are questions that the first format is to complete.
        """
        record |= {"answer_format": self.best, "answer_formats": {}, "formats": {}}
        tables: list[pa.Table] = []
        for quant, experiment in self.experiments.items():
            known = self.parts.has(f"{quant} {WHOLE}")
            with nullcontext((None, None)) if known else self.loaded(quant) as (policy, engine):
                if experiment is self.first and completed:
                    record["contamination"] = contamination(self.parts, completed, policy, engine)
                    self.write_page(record)
                if experiment is self.first and isinstance(experiment.task, PromptTask):
                    tables += self.in_answer_formats(record, engine)
                task = in_answer_format(experiment.task, self.best)
                measured = self.parts(f"{quant} {WHOLE}", partial(self.measured, record, quant, task, policy, engine))
            record["formats"][quant] = measured
            record["prompt"] = record.get("prompt", measured.pop("prompt"))
            tables.append(labelled(table(self.answers(quant, task), self.options.texts), quant, self.best))
            right = 100 * sum(measured["correct"]) / rights(measured)
            log.info("%s: %.1f %% right at temperature 1", quant, right)
            self.write_page(record)
        return pa.concat_tables(tables)

    @contextmanager
    def loaded(self, quant: str) -> Iterator[tuple[Policy, RolloutEngine]]:
        """The policy of a format and its engine; before them that of the first, if it was measured earlier."""
        experiment = self.experiments[quant]
        if experiment is not self.first and self.reference.policy is None:
            first, task = next(iter(self.experiments)), in_answer_format(self.first.task, self.best)
            (plain,) = (asked for asked in self.answers(first, task) if asked.temperature == 1)
            with phase(f"loading {self.first.model.name} in {first}"):
                self.reference.take(self.first.train, build_policy(self.first, self.base, self.device), plain)
        with phase(f"loading {experiment.model.name} in {quant}"):
            policy = build_policy(experiment, self.base, self.device)
        number = [*self.experiments].index(quant) + 1
        with (
            closing(experiment.engine.build(policy)) as engine,
            phase(f"{quant} ({number} of {len(self.experiments)} weight formats)"),
        ):
            yield policy, engine

    def measured(
        self, record: dict[str, Any], quant: str, task: Task, policy: Policy | None, engine: RolloutEngine | None
    ) -> dict[str, Any]:
        """All numbers of a weight format, and the text of a prompt."""
        assert policy is not None and engine is not None
        keep, options, size = self.parts.of(quant), self.options, probe_plan(self.options)
        experiment = replace(self.experiments[quant], task=task)

        def write_page(asked: Sequence[AnswerSet]) -> None:
            record["formats"][quant] = {"temperatures": {f"{at.temperature:g}": numbers(at) for at in asked}}
            self.write_page(record)

        results = measure(experiment, policy, engine, size, self.reference, keep, write_page)[0]
        results["prompt"] = policy.text_of(size.prompts_of(task)[0])
        if options.rise > 0:
            with phase(f"looking for the noise that raises entropy by {options.rise:.0%}"):
                prompts = min(DOSE_PROMPTS, options.questions)
                results["rise"] = sigma_of_rise(experiment, policy, engine, options.rise, prompts, DOSE_DRAWS, keep)
        return results

    def answers(self, quant: str, task: Task) -> list[AnswerSet]:
        """The answers in a format, which are known, at all temperatures."""
        size, keep = probe_plan(self.options), self.parts.of(quant)
        return [answers_of(task, None, size, keep, at, self.device) for at in size.temperatures]

    def in_answer_formats(self, record: dict[str, Any], engine: RolloutEngine | None) -> list[pa.Table]:
        """Find what greedy answers are worth in each answer format, each asked for by its own instruction: their rows.

        The best is that of all further questions. Without an engine all answers are known.
        """
        names = self.options.answer_formats or [*ANSWER_FORMATS]
        by_format, tables = record["answer_formats"], []
        for name in names if len(names) > 1 else ():
            task = in_answer_format(self.first.task, name)
            prompts = probe_plan(self.options).prompts_of(task)[:ANSWER_FORMAT_QUESTIONS]
            how = f"answers in {name}", task, engine, prompts, 0, 1, "answers", self.device
            with phase(f"answers in {name}"):
                asked = kept_answers(self.parts, *how)
            by_format[name] = numbers(asked)
            tables.append(labelled(table([asked], self.options.texts), self.first.quant.name, name))
            self.write_page(record)
        if by_format and not self.chosen:
            self.best = record["answer_format"] = best_of(by_format, self.best)
        return tables

    def write_page(self, record: dict[str, Any]) -> None:
        self.parts.page(so_far(record))


def to_ask(experiments: Mapping[str, Experiment], options: Any) -> str:
    """How much a probe asks, before it does."""
    task = next(iter(experiments.values())).task
    names = options.answer_formats or [*ANSWER_FORMATS]
    compared = len(names) if isinstance(task, PromptTask) and len(names) > 1 else 0
    greedy = compared * min(ANSWER_FORMAT_QUESTIONS, options.questions)
    answers = options.questions * sum(options.samples if at else 1 for at in options.temperatures)
    each = [
        f"{answers:,} answers",
        *([f"noise of {len(options.sigmas)} sizes"] if options.sigmas else []),
        *([f"a search for the noise that raises entropy by {options.rise:.0%}"] if options.rise else []),
    ]
    parts = [
        *([f"{options.contamination} questions of each part to complete"] if options.contamination else []),
        *([f"{greedy:,} greedy answers in {compared} answer formats"] if greedy else []),
        f"in each of {len(experiments)} weight formats {', '.join(each)}",
    ]
    return (
        f"to ask: {'; '.join(parts)}. Answers have up to {task.max_completion_tokens:,} tokens; questions=, samples=, "
        "temperatures=, answer_formats= and rise=0 ask less"
    )


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def probe_options(options: Any) -> dict[str, Any]:
    """The options of a probe that decide its numbers."""
    return {key: value for key, value in vars(options).items() if key not in ("out", "words")}


def rights(measured: dict[str, Any]) -> int:
    return measured["samples"] * len(measured["correct"])


def probe_plan(options: Any) -> ProbePlan:
    return ProbePlan(
        questions=options.questions,
        split=options.split,
        samples=options.samples,
        temperatures=options.temperatures,
        sigmas=options.sigmas,
        prompts=min(CURVE_PROMPTS, options.questions),
        draws=range(1),
        texts=options.texts,
        draw="answers",
    )


def in_answer_format(task: Task, name: str | None) -> Task:
    """`task` with this answer format, if its prompts have one."""
    return task if name is None or not isinstance(task, PromptTask) else replace(task, answer_format=name)


def best_of(answer_formats: dict[str, dict[str, Any]], asked: str | None) -> str:
    """The format in which most are right, of equals the one in which most have an answer, then the one of the task."""

    def worth(name: str) -> tuple[float, float, bool]:
        return sum(answer_formats[name]["correct"]), answer_formats[name]["found"], name == asked

    return max(answer_formats, key=worth)


def labelled(rows: pa.Table, quant: str, answer_format: str | None) -> pa.Table:
    rows = rows.add_column(0, "answer_format", pa.repeat(pa.scalar(answer_format, pa.string()), len(rows)))
    return rows.add_column(0, "quant", pa.repeat(quant, len(rows)))
