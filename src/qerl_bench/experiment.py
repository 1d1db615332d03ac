"""THE LOOP, to be read top to bottom: rollout -> reward -> update -> log -> evaluate.

Where sampling and training share one model (engine=hf), "sync" is nothing but the noise that goes into its norm scales
for the rollout and comes out again; an engine with weights of its own takes over adapter and noise there. Every random
draw is seeded by (run seed, purpose, step): a resumed run repeats an uninterrupted one.
"""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from qerl_bench import metrics
from qerl_bench.algo.dynamic import fill
from qerl_bench.aqn.injector import NoiseReport, noise_metrics
from qerl_bench.checks import TrainingStopped, require
from qerl_bench.config import Experiment
from qerl_bench.device import PhaseTimer, resolve_device
from qerl_bench.engine.base import RolloutEngine, Sampling
from qerl_bench.eval.base import metrics_of
from qerl_bench.eval.record import record_evaluation
from qerl_bench.figures.run import run_figures
from qerl_bench.logger.base import Sink
from qerl_bench.model.digest import digest_of
from qerl_bench.model.policy import Policy
from qerl_bench.model_setup import base_checkpoint, build_policy
from qerl_bench.progress import Steps
from qerl_bench.quant.error_decomposition import write_layers
from qerl_bench.records import Group
from qerl_bench.rundir import RunDir, as_dict, last_checkpoint, write_atomically
from qerl_bench.seeding import derive
from qerl_bench.study.table import no_gradient_warning, render, summary
from qerl_bench.train.batch import Batch, make_batch
from qerl_bench.train.nonfinite import NonFinite, dump, during
from qerl_bench.train.update import make_optimizer, update

log = logging.getLogger(__name__)
KEPT_ROLLOUTS = 4  # completions per step in rollouts.jsonl


def run_experiment(experiment: Experiment, cfg: DictConfig) -> None:
    """Run, or continue, one experiment in its run directory. `cfg` is the resolved config it was built from."""
    device = resolve_device(experiment.device)
    reason = experiment.quant.unsupported_reason(device)
    require(reason is None, f"quant={experiment.quant.name} cannot run here: {reason}")
    if device == "cpu":
        torch.use_deterministic_algorithms(True)

    with RunDir(experiment.run_dir, cfg) as run:
        if run.finished:
            log.info("finished before: %s (delete the folder to run it again)", run.path)
            print(render(summary([run.path])))
            return
        base = base_checkpoint(experiment.model, experiment.task, experiment.root)
        run.write_environment(device, digest_of(experiment.model, base))
        torch.manual_seed(derive(experiment.seed, "torch"))  # adapter dropout, the only draw without a seed of its own
        policy = build_policy(experiment, base, device)
        write_layers(
            run.path / "layers.parquet", policy.layers, experiment.quant.name, experiment.quantizer.name, policy.kernels
        )
        optimizer = make_optimizer(policy, experiment.optim)
        first = run.resume_step()
        with ExitStack() as stack:
            engine = experiment.engine.build(policy)
            stack.callback(engine.close)
            write_atomically(run.path / "engine.json", json.dumps(engine.record(), indent=1))
            if experiment.algo.on_policy:  # a prompt that is too long is found here, not at the step that draws it
                engine.require_room(experiment.task.stored_prompts(), rollout_sampling(experiment, step=1))
            if first > 0:
                load_checkpoint(run, policy, optimizer)
                log.info("continuing after step %d", first)
            sinks = experiment.logger.build(run, as_dict(cfg))
            for sink in sinks:  # each is closed, whatever becomes of the others
                stack.push(lambda kind, error, trace, sink=sink: sink.close(failed=error is not None))
            if first == 0:
                evaluate(experiment, policy, engine, run, sinks, step=0)
            steps = Steps(first, experiment.steps)
            stack.callback(steps.close)
            for step in range(first + 1, experiment.steps + 1):
                measured = train_step(experiment, policy, engine, optimizer, run, step)
                for sink in sinks:
                    sink.log("train", step, measured)
                steps.report(step, measured)
                if step % experiment.save_every == 0 or step == experiment.steps:
                    run.save_checkpoint(
                        step, lambda folder, step=step: save(folder, experiment, policy, optimizer, run, step)
                    )
            steps.close()
            evaluate(experiment, policy, engine, run, sinks, step=experiment.steps)
        run_figures(run.path)
        run.finish()
        table = summary([run.path])
        if warning := no_gradient_warning(table):
            log.warning(warning)
        print(render(table))


def train_step(
    experiment: Experiment,
    policy: Policy,
    engine: RolloutEngine,
    optimizer: torch.optim.Optimizer,
    run: RunDir,
    step: int,
) -> dict[str, float]:
    """One optimiser step, with every metric of it."""
    phases = PhaseTimer(str(policy.device.type))
    with phases.phase("step"):
        if experiment.algo.on_policy:
            batch, found = sampled_batch(experiment, policy, engine, run, step, phases)
        else:
            batch, found = demonstrated_batch(experiment, policy, step), {}
        with phases.phase("train"):
            found |= update(experiment, policy, optimizer, batch, step, partial(not_finite, experiment, run, step))
    found |= {f"time/{name}_s": seconds for name, seconds in phases.seconds.items()}
    found["speed/train_tok_s"] = int(batch.lengths.sum()) / phases.seconds["train"]
    if experiment.algo.on_policy:
        experiment.importance_sampling.watch(step, found)
        found["speed/rollout_tok_s"] = found["completions/tokens"] / phases.seconds["rollout"]
        found["memory/rollout_gib"] = phases.peak_gib["rollout"]
    found["memory/train_gib"] = phases.peak_gib["train"]
    found["memory/peak_gib"] = max(phases.peak_gib.values())
    return found


def rollout_sampling(experiment: Experiment, step: int) -> Sampling:
    """How the completions of one step are drawn."""
    return Sampling(
        samples=experiment.rollout.group_size,
        temperature=experiment.rollout.temperature,
        max_tokens=experiment.task.max_completion_tokens,
        seed=derive(experiment.seed, "rollout", step),
    )


def sampled_batch(
    experiment: Experiment, policy: Policy, engine: RolloutEngine, run: RunDir, step: int, phases: PhaseTimer
) -> tuple[Batch, dict[str, float]]:
    """Sample from the noisy policy, judge, and turn rewards into advantages."""
    rollout, task, algo = experiment.rollout, experiment.task, experiment.algo
    sampling = rollout_sampling(experiment, step)
    seen: set[str] = set()
    draws: list[NoiseReport] = []
    syncs: list[dict[str, float]] = []

    def sample(refill: int) -> list[Group]:
        """The prompts of this step, or new ones for a refill, completed and judged."""
        seed = experiment.seed if refill == 0 else derive(experiment.seed, "refill", refill)
        prompts = [
            prompt for prompt in task.train_prompts(step, rollout.prompts_per_step, seed) if prompt.id not in seen
        ]
        seen.update(prompt.id for prompt in prompts)
        rollouts = []
        for number, sharing in experiment.noise.draws(prompts, len(draws)):
            with ExitStack() as noise_in:
                with phases.phase("sync"):
                    draws.append(noise_in.enter_context(policy.noise.for_rollout(step, number)))
                    syncs.append(engine.sync(sharing))
                with phases.phase("rollout"), during(f"step {step}, sampling"):
                    rollouts += engine.generate(sharing, sampling)
        with phases.phase("reward"):
            rewards = task.rewards(rollouts)
        bounds = [slice(i, i + rollout.group_size) for i in range(0, len(rollouts), rollout.group_size)]
        return [Group(rollouts=rollouts[group], rewards=rewards[group]) for group in bounds]

    groups, sampled, refills = fill(sample, algo, rollout.prompts_per_step)
    with phases.phase("sync"):
        parked = engine.sleep()
    rewards = torch.tensor([[reward.total for reward in group.rewards] for group in groups])  # (P, G)
    lengths = torch.tensor([[len(r.token_ids) for r in group.rollouts] for group in groups])  # (P, G)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    judged = [(r, w) for group in sampled for r, w in zip(group.rollouts, group.rewards, strict=True)]
    kept = [
        {
            "step": step,
            "prompt": r.prompt.id,
            "completion": r.text,
            "gold": r.prompt.answer,
            "reward": w.total,
            **w.parts,
        }
        for r, w in judged[:KEPT_ROLLOUTS]
    ]
    run.append("rollouts.jsonl", kept)
    batch = make_batch(
        [r.prompt_ids for r in rollouts],
        [r.token_ids for r in rollouts],
        policy.pad_id,
        policy.device,
        [r.logprobs for r in rollouts],
        algo.advantages(rewards, lengths).flatten(),
    )
    found = metrics.of_rollouts([r for r, _ in judged], [w for _, w in judged], rollout.group_size)
    found |= {"dynamic/refills": refills, "dynamic/groups_kept": len(groups)}
    found |= metrics.of_syncs(syncs) | parked
    found |= noise_metrics(draws) | policy.noise.controller.update(step, found["entropy"])
    return batch, found


def demonstrated_batch(experiment: Experiment, policy: Policy, step: int) -> Batch:
    """The demonstrations of one supervised step."""
    shown = experiment.task.demonstrations(step, experiment.rollout.prompts_per_step, experiment.seed)
    return make_batch(
        [policy.prompt_ids(demonstration.prompt.messages) for demonstration in shown],
        [policy.completion_ids(demonstration.completion) for demonstration in shown],
        policy.pad_id,
        policy.device,
    )


def not_finite(experiment: Experiment, run: RunDir, step: int, case: NonFinite) -> None:
    """Keep what is needed to understand it, then stop the run or leave this update out."""
    message = dump(run, step, case)
    if experiment.train.on_nonfinite == "stop":
        raise TrainingStopped(f"{message}. To leave such updates out instead: train.on_nonfinite=skip")
    log.warning("%s. This update is left out.", message)


def evaluate(
    experiment: Experiment, policy: Policy, engine: RolloutEngine, run: RunDir, sinks: list[Sink], step: int
) -> None:
    """Evaluate the clean policy and record it; step 0 is the quality of the packed base before any training."""
    with during(f"evaluation after step {step}"):
        evaluation = experiment.eval.evaluate(policy, engine, experiment.task, run, experiment.seed)
    if evaluation is None:
        return
    scores = record_evaluation(run, experiment.task.name, step, evaluation)
    for sink in sinks:
        sink.log("eval", step, metrics_of(scores))
    log.info("step %d, %d questions: %s", step, scores[0].n, ", ".join(map(str, scores)))


def save(
    folder: Path, experiment: Experiment, policy: Policy, optimizer: torch.optim.Optimizer, run: RunDir, step: int
) -> None:
    """Fill a checkpoint folder with everything that the next step depends on."""
    policy.save(folder)
    state = {"optimizer": optimizer.state_dict(), "torch_rng": torch.get_rng_state(), "noise": policy.noise.state()}
    torch.save(state, folder / "trainer.pt")
    position = {
        "step": step,
        "prompts_seen": step * experiment.rollout.prompts_per_step,
        "sigma": policy.noise.controller.sigma(step),
        "lr": experiment.optim.lr_at(step, experiment.steps),
        "wall_s": run.wall_s,
    }
    (folder / "state.json").write_text(json.dumps(position, indent=1))


def load_checkpoint(run: RunDir, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Bring policy, optimiser, noise, random state and clock back to the run's last checkpoint."""
    folder = last_checkpoint(run.path)
    assert folder is not None
    policy.load(folder)
    state: dict[str, Any] = torch.load(folder / "trainer.pt", map_location=policy.device, weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["torch_rng"].cpu())
    policy.noise.restore(state["noise"])
    run.spent_s = json.loads((folder / "state.json").read_text())["wall_s"]
