"""Measures one base before any arm is trained: its answers in every weight format, and the noise of each arm's dose.

    python -m qerl_bench.conduct.probe_process STUDY.yaml BASE FORMAT[,FORMAT] ARM[,ARM] [word ...]

A process of its own for each base, which pretrains the base, or converts the copy of a GGUF file, first if none has.
The results, which later calls only complete, are in probes/ below root.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

from qerl_bench.conduct.dose_key import dose_digest, dose_key
from qerl_bench.config import build, compose
from qerl_bench.engine.base import RolloutEngine
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model.digest import digest_of
from qerl_bench.model.gguf.convert import record_of
from qerl_bench.model.policy import Policy
from qerl_bench.model_setup import base_checkpoint, build_noise, build_policy
from qerl_bench.probe.answers import numbers, sample_answers
from qerl_bench.probe.measure import ProbePlan, Reference, measure, questions_scored
from qerl_bench.probe.rise import sigma_of_rise
from qerl_bench.run_setup import prepare_device
from qerl_bench.task.base import Task
from qerl_core.process.children import end_with_parent
from qerl_core.rundir.durable import write_atomically
from qerl_core.rundir.environment import environment, versions
from qerl_core.rundir.locks import wait_for_lock
from qerl_core.seeding import derive
from qerl_studies.design.design import Design, read_design

ANSWERS = "answers"
Asked = tuple[Callable[[Policy, RolloutEngine], dict[str, Any]], Experiment]


def probe_base(design: Design, base: int, formats: Sequence[str]) -> None:
    """Complete the record of a base: those of `formats` that it lacks, and the doses of arms in them."""
    file = design.probe_file(base)
    record = read_record(file, base)
    detailed, reference = bool(design.probe.details), Reference()
    for quant in formats:
        arms = [arm for arm in design.arms if design.format_of(arm) == quant]
        dosed = [arm for arm in arms if arm.dosed and arm.name not in record["doses"]]
        if quant in record["formats"] and not dosed:
            continue
        started = time.monotonic()
        plain = build(compose(design.base_words(design.plain(quant), base)))
        device = prepare_device(plain.device, plain.quant)
        checkpoint = base_checkpoint(plain.model, plain.task, plain.root)
        asker = partial(answers, design, plain.task)
        if detailed:
            asker = partial(detailed_answers, base, quant, reference, checkpoint, design, plain)
        asked: dict[str, Asked] = {} if quant in record["formats"] else {ANSWERS: (asker, plain)}
        noisy = {arm.name: build(compose(design.words(arm, base, 0, sigma=1.0))) for arm in dosed}
        for one in noisy.values():
            asked.setdefault(dose_key(one), (partial(dose, design, one), one))
        found = run_probes(asked, checkpoint, device)
        whole = {"digest": digest_of(plain.model, checkpoint), "versions": versions(), "device": device}
        if detailed:
            whole |= {"unit": [*design.units[base].words], "file": record_of(checkpoint), **machine(device)}
        file.parent.mkdir(parents=True, exist_ok=True)
        with wait_for_lock(file.with_suffix(".lock"), f"the probe of base {base}"):  # another study may measure it too
            record = read_record(file, base) | whole
            if ANSWERS in found:
                record["formats"][quant] = found[ANSWERS]
            record["doses"] |= {name: {**found[dose_key(one)], "of": dose_digest(one)} for name, one in noisy.items()}
            write_atomically(file, json.dumps(record))
        print(f"base {base}, {quant}: {time.monotonic() - started:.1f} s", flush=True)


def read_record(file: Path, base: int) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {"base": base, "formats": {}, "doses": {}}


def weights_key(experiment: Experiment) -> str:
    """What decides the untrained policy of an arm, in words, but for its noise; the task is that of all arms."""
    one = experiment
    return repr((one.model, one.quant, one.quantizer, one.lora, one.train, one.kernel, one.seed))


def run_probes(asked: Mapping[str, Asked], base: Path | None, device: str) -> dict[str, Any]:
    """What is asked of a base before training, each on its own weights. One policy is in memory at a time."""
    found: dict[str, Any] = {}
    for weights in dict.fromkeys(weights_key(one) for _, one in asked.values()):
        alike = {name: (ask, one) for name, (ask, one) in asked.items() if weights_key(one) == weights}
        found |= probe_with_policy(alike, base, device)
    return found


def probe_with_policy(asked: Mapping[str, Asked], base: Path | None, device: str) -> dict[str, Any]:
    """What is asked of experiments that have the same weights: each with its own noise, and a fresh engine."""
    _, first = next(iter(asked.values()))
    policy = build_policy(first, base, device)
    found = {}
    for name, (ask, one) in asked.items():
        policy.noise = build_noise(one, policy.model, policy.structure, policy.layers)
        with closing(one.engine.build(policy)) as engine:
            found[name] = ask(policy, engine)
    return found


def answers(design: Design, task: Task, policy: Policy, engine: RolloutEngine) -> dict[str, Any]:
    """How often each of the probe's questions, which RL could draw, is answered, and the entropy of the policy."""
    size = design.probe
    prompts = task.train_prompts(1, size.questions, derive("probe"))
    found = numbers(sample_answers(task, engine, prompts, 1, size.samples, ANSWERS))
    return {key: found[key] for key in ("correct", "samples", "entropy")}


def detailed_answers(
    base: int,
    quant: str,
    reference: Reference,
    checkpoint: Path | None,
    design: Design,
    experiment: Experiment,
    policy: Policy,
    engine: RolloutEngine,
) -> dict[str, Any]:
    """All that a probe with details has of one format; its answers go to a file. The first format is the reference."""
    first, plan = design.formats[0], probe_plan(design, base)
    if reference.policy is None and quant != first:  # measured in an earlier call
        again_asked(design, base, reference, checkpoint, policy.device.type)
    found, rows = measure(experiment, policy, engine, plan, reference)
    file = design.answers_file(base, quant)
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(rows, file, compression="zstd")
    return found


def probe_plan(design: Design, base: int) -> ProbePlan:
    """What a probe with details measures. Copies of a file have random numbers of their own, bases the same."""
    size, dose, copy = design.probe, design.dose, design.units[base].first_seed
    first = 0 if copy is None else copy * dose.draws
    return ProbePlan(
        questions=size.questions,
        split=size.split,
        samples=size.samples,
        temperatures=size.temperatures,
        sigmas=size.sigmas,
        prompts=dose.prompts,
        draws=range(first, first + dose.draws),
        texts=size.texts,
        draw=ANSWERS if copy is None else f"{ANSWERS}/{copy}",
    )


def again_asked(design: Design, base: int, reference: Reference, checkpoint: Path | None, device: str) -> None:
    """The reference of a base whose first format was measured before: its policy, and those answers that are scored."""
    plain, plan = build(compose(design.base_words(design.plain(design.formats[0]), base))), probe_plan(design, base)
    policy = build_policy(plain, checkpoint, device)
    with closing(plain.engine.build(policy)) as engine:
        prompts = plan.prompts_of(plain.task)[: questions_scored(plan.samples)]
        reference.take(plain.train, policy, sample_answers(plain.task, engine, prompts, 1, plan.samples, plan.draw))


def machine(device: str) -> dict[str, Any]:
    """What decides numbers besides the design: code, and card."""
    found = environment(device)
    return {key: found[key] for key in ("commit", "dirty", "code", "gpu", "cpu", "driver")}


def dose(design: Design, experiment: Experiment, policy: Policy, engine: RolloutEngine) -> dict[str, Any]:
    """The sigma that raises the entropy as wanted, and the rise and KL that it has on other prompts and draws."""
    size = design.dose
    return sigma_of_rise(experiment, policy, engine, size.rise, size.prompts, size.draws)


def main(words: list[str]) -> None:
    path, base, formats, arms, *common = words
    design = read_design(Path(path), common)
    chosen = tuple(arm for arm in design.arms if arm.name in arms.split(","))
    probe_base(replace(design, arms=chosen), int(base), formats.split(","))


if __name__ == "__main__":
    end_with_parent()
    main(sys.argv[1:])
