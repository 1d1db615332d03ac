"""Measures one model in answer formats and weight formats, one policy in memory beside the first."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from qerl_bench.engine.base import RolloutEngine
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model.digest import digest_of, name_of_base
from qerl_bench.model.gguf.convert import record_of, told
from qerl_bench.model_setup import base_checkpoint, build_policy
from qerl_bench.probe.answers import asked_at, numbers, table
from qerl_bench.probe.measure import Reference, Wanted, measure
from qerl_bench.probe.rise import sigma_of_rise
from qerl_bench.run_setup import prepare_device
from qerl_bench.task.grader.extract import ANSWER_FORMATS
from qerl_bench.task.prompt_task import PromptTask
from qerl_core.checks import require
from qerl_core.process.progress import phase
from qerl_core.rundir.environment import environment

log = logging.getLogger(__name__)
ANSWER_FORMAT_QUESTIONS = 64  # to choose the answer format, at most
CURVE_PROMPTS = 32  # of a curve of noise, at most
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


def probe(experiments: dict[str, Experiment], options: Any, chosen: bool) -> tuple[dict[str, Any], pa.Table]:
    """The record and the answers. The answer format is the best of those asked in, unless it was `chosen`."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    first = next(iter(experiments.values()))
    device = prepare_device(first.device, first.quant)
    base = base_checkpoint(first.model, first.task, first.root)
    if (origin := record_of(base)) and (rounded := told(origin)):
        log.info(rounded)
    reference, parts = Reference(), []
    answer_formats: dict[str, Any] = {}
    found: dict[str, Any] = {}
    best, prompt = getattr(first.task, "answer_format", None), ""
    for quant, experiment in experiments.items():
        with phase(f"loading {experiment.model.name} in {quant}"):
            policy = build_policy(experiment, base, device)
        with closing(experiment.engine.build(policy)) as engine:
            if experiment is first and isinstance(experiment.task, PromptTask):
                answer_formats, asked = in_answer_formats(experiment, engine, options)
                parts += asked
                best = best if chosen or not answer_formats else best_of(answer_formats, best)
            one = in_answer_format(experiment, best)
            prompt = policy.text_of(wanted(options).prompts_of(one)[0])
            measured, rows = measure(one, policy, engine, wanted(options), reference)
            if options.rise > 0:
                with phase(f"looking for the noise that raises entropy by {options.rise:.0%}"):
                    prompts = min(DOSE_PROMPTS, options.questions)
                    measured["rise"] = sigma_of_rise(one, policy, engine, options.rise, prompts, DOSE_DRAWS)
        found[quant] = measured
        parts.append(labelled(rows, quant, best))
        log.info("%s: %.1f %% right at temperature 1", quant, 100 * sum(measured["correct"]) / rights(measured))
    record = {
        "model": name_of_base(first.model),
        "digest": digest_of(first.model, base),
        "file": origin,
        "task": first.task.name,
        "group": first.rollout.group_size,
        "max_completion_tokens": first.task.max_completion_tokens,
        "answer_format": best,
        "prompt": prompt,
        "answer_formats": answer_formats,
        "formats": found,
        "started": started,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": {key: value for key, value in environment(device).items() if key not in ("metrics", "argv")},
    }
    return record, pa.concat_tables(parts)


def rights(measured: dict[str, Any]) -> int:
    return measured["samples"] * len(measured["correct"])


def wanted(options: Any) -> Wanted:
    return Wanted(
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


def in_answer_formats(
    experiment: Experiment, engine: RolloutEngine, options: Any
) -> tuple[dict[str, dict[str, Any]], list[pa.Table]]:
    """What greedy answers are worth in each answer format, each asked for by its own instruction, and their rows."""
    names = options.answer_formats or [*ANSWER_FORMATS]
    found, parts = {}, []
    for name in names if len(names) > 1 else ():
        one = in_answer_format(experiment, name)
        prompts = wanted(options).prompts_of(one)[:ANSWER_FORMAT_QUESTIONS]
        asked = asked_at(one.task, engine, prompts, 0, 1, "answers")
        found[name] = numbers(asked)
        parts.append(labelled(table([asked], options.texts), experiment.quant.name, name))
    return found, parts


def in_answer_format(experiment: Experiment, name: str | None) -> Experiment:
    if name is None or not isinstance(experiment.task, PromptTask):
        return experiment
    return replace(experiment, task=replace(experiment.task, answer_format=name))


def best_of(answer_formats: dict[str, dict[str, Any]], asked: str | None) -> str:
    """The format in which most are right, of equals the one in which most have an answer, then the one of the task."""

    def worth(name: str) -> tuple[float, float, bool]:
        return sum(answer_formats[name]["correct"]), answer_formats[name]["found"], name == asked

    return max(answer_formats, key=worth)


def labelled(rows: pa.Table, quant: str, answer_format: str | None) -> pa.Table:
    rows = rows.add_column(0, "answer_format", pa.repeat(pa.scalar(answer_format, pa.string()), len(rows)))
    return rows.add_column(0, "quant", pa.repeat(quant, len(rows)))
