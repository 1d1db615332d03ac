"""Measures one base before any arm is trained: its answers in every weight format, and the noise of each arm's dose.

    python -m qerl_bench.studies.conduct.probe STUDY.yaml BASE FORMAT[,FORMAT] [word ...]

A process of its own for each base, which pretrains the base first if nobody has. The results, which later calls only
complete, are in probes/ below root.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from qerl_bench.config import build, compose
from qerl_bench.dose import curve, probe_sampling
from qerl_bench.engine.base import RolloutEngine
from qerl_bench.experiment_spec import Experiment
from qerl_bench.metrics import mean_entropy
from qerl_bench.model.digest import digest_of
from qerl_bench.model.policy import Policy
from qerl_bench.model_setup import base_checkpoint, build_noise, build_policy
from qerl_bench.process.children import end_with_parent
from qerl_bench.rundir.environment import versions
from qerl_bench.seeding import derive
from qerl_bench.session import on_base_in, prepare_device
from qerl_bench.studies.conduct.dose import find_sigma
from qerl_bench.studies.design.design import Design, read_design

ANSWERS = "answers"
Asked = tuple[Callable[[Design, Experiment, Policy, RolloutEngine], dict[str, Any]], Experiment]


def probe_base(design: Design, base: int, formats: Sequence[str]) -> None:
    """Complete the record of a base: those of `formats` that it lacks, and the doses of arms in them."""
    file = design.probe_file(base)
    record = json.loads(file.read_text()) if file.is_file() else {"base": base, "formats": {}, "doses": {}}
    for quant in formats:
        arms = [arm for arm in design.arms if design.format_of(arm) == quant]
        dosed = [arm for arm in arms if arm.dosed and arm.name not in record["doses"]]
        if quant in record["formats"] and not dosed:
            continue
        started = time.monotonic()
        plain = build(compose(design.base_words(design.plain(quant), base)))
        device = prepare_device(plain.device, plain.quant)
        checkpoint = base_checkpoint(plain.model, plain.task, plain.root)
        asked: dict[str, Asked] = {} if quant in record["formats"] else {ANSWERS: (answers, plain)}
        noisy = {arm.name: build(compose(design.words(arm, base, 0, sigma=1.0))) for arm in dosed}
        for one in noisy.values():
            asked.setdefault(decides_dose(one), (dose, one))
        found = measured(design, asked, checkpoint, device)
        if ANSWERS in found:
            record["formats"][quant] = found[ANSWERS]
        record["doses"] |= {name: found[decides_dose(one)] for name, one in noisy.items()}
        record |= {"digest": digest_of(plain.model, checkpoint), "versions": versions(), "device": device}
        file.parent.mkdir(parents=True, exist_ok=True)
        writing = file.with_suffix(".writing")
        writing.write_text(json.dumps(record))
        writing.replace(file)
        print(f"base {base}, {quant}: {time.monotonic() - started:.1f} s", flush=True)


def decides_dose(experiment: Experiment) -> str:
    """What decides the dose of an arm, in words: equal for arms that differ in the schedule alone."""
    adapter = experiment.lora if experiment.noise.where == "adapters" else None
    return repr((experiment.quant, experiment.quantizer, adapter, experiment.noise, experiment.rollout))


def decides_weights(experiment: Experiment) -> str:
    """What decides the untrained policy of an arm, in words, but for its noise; base and task are those of all arms."""
    one = experiment
    return repr((one.quant, one.quantizer, one.lora, one.train, one.kernel, one.seed))


def measured(design: Design, asked: Mapping[str, Asked], base: Path | None, device: str) -> dict[str, Any]:
    """What is asked of a base before training, each on its own weights. One policy is in memory at a time."""
    found: dict[str, Any] = {}
    for weights in dict.fromkeys(decides_weights(one) for _, one in asked.values()):
        alike = {name: (ask, one) for name, (ask, one) in asked.items() if decides_weights(one) == weights}
        found |= on_one_policy(design, alike, base, device)
    return found


def on_one_policy(design: Design, asked: Mapping[str, Asked], base: Path | None, device: str) -> dict[str, Any]:
    """What is asked of experiments that have the same weights: each with its own noise, and a fresh engine."""
    _, first = next(iter(asked.values()))
    policy = build_policy(first, base, device)
    found = {}
    for name, (ask, one) in asked.items():
        policy.noise = build_noise(one, policy.model, policy.structure, policy.layers)
        with closing(one.engine.build(policy)) as engine:
            found[name] = ask(design, one, policy, engine)
    return found


def answers(design: Design, experiment: Experiment, policy: Policy, engine: RolloutEngine) -> dict[str, Any]:
    """How often each of the probe's questions, which RL could draw, is answered, and the entropy of the policy."""
    size = design.probe
    prompts = experiment.task.train_prompts(1, size.questions, derive("probe"))
    rollouts = engine.generate(prompts, probe_sampling(experiment, size.samples, 1.0, "answers"))
    right = [float(reward.correct) for reward in experiment.task.rewards(rollouts)]
    by_question = [int(sum(right[i : i + size.samples])) for i in range(0, len(right), size.samples)]
    return {"correct": by_question, "samples": size.samples, "entropy": mean_entropy(rollouts)}


def dose(design: Design, experiment: Experiment, policy: Policy, engine: RolloutEngine) -> dict[str, Any]:
    """The sigma that raises the entropy as wanted, and the rise and KL that it has on other prompts and draws."""
    task, size, sampled_in = experiment.task, design.dose, experiment.rollout.quant
    search, check = (task.train_prompts(step, size.prompts, derive("dose")) for step in (1, 2))
    with on_base_in("rollout.quant", sampled_in, experiment, policy, engine) as (_, sampler):
        draws, fresh = range(size.draws), range(size.draws, 2 * size.draws)
        (quiet,) = curve(experiment, policy, sampler, search, [0.0], draws)

        def rise(sigma: float) -> float:
            return curve(experiment, policy, sampler, search, [sigma], draws)[0].entropy / quiet.entropy - 1

        sigma, tried = find_sigma(rise, size.rise, start=0.1)
        if sigma is None:
            return {"sigma": None, "tried": tried}
        before, noisy = curve(experiment, policy, sampler, check, [0.0, sigma], fresh)
    rise_on_others = noisy.entropy / before.entropy - 1
    return {"sigma": sigma, "rise": rise_on_others, "kl": noisy.kl, "entropy": before.entropy, "tried": tried}


def main(words: list[str]) -> None:
    path, base, formats, *common = words
    probe_base(read_design(Path(path), common), int(base), formats.split(","))


if __name__ == "__main__":
    end_with_parent()
    main(sys.argv[1:])
