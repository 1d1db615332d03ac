"""THE LOOP, to be read top to bottom: sample -> grade -> train -> log -> evaluate.

With engine=hf one model samples and trains, so syncing the weights means only putting noise into norm scales or adapter
before the rollout and taking it out afterwards. An engine with its own copy of the weights gets adapter and noise then.
With `rollout.quant` or `rollout.activations` a second model samples, which shares all but its packed layers; with
`rollout.merge` base and adapter are rounded together meanwhile, and with `rollout.lag` the adapter is an earlier one.
Every random draw is seeded by (run seed, purpose, step), so a resumed run repeats an uninterrupted one.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig

from qerl_bench import dose
from qerl_bench.aqn.injector import NoiseReport, noise_metrics
from qerl_bench.conduct.run_messages import opening
from qerl_bench.engine.base import RolloutEngine, Sampling
from qerl_bench.engine.merged import MergingEngine
from qerl_bench.estimate.words import run_estimate_lines
from qerl_bench.eval import formats
from qerl_bench.eval.base import metrics_of
from qerl_bench.eval.validation import (
    best_checkpoint,
    evaluation_after,
    is_due,
    is_on,
    is_whole,
    log_validation,
    validation_of_whole,
)
from qerl_bench.evaluation import answers_in_other_formats, evaluate, validate
from qerl_bench.experiment_spec import Experiment
from qerl_bench.logger.base import MetricsMirror, no_mirror
from qerl_bench.model.policy import Policy
from qerl_bench.model.rounded import shares, take_counts
from qerl_bench.parallel import ALONE, World, largest
from qerl_bench.quant.error_decomposition import write_layers
from qerl_bench.quant.kv_kinds import kv_record
from qerl_bench.run_setup import Setup, on_base_of, prepare_device, require_places, set_up
from qerl_bench.task.graded import all_checked
from qerl_bench.train import trainer_state
from qerl_bench.train.batch import demonstration_batch, rollout_batch
from qerl_bench.train.collapse import collapse
from qerl_bench.train.data_parallel import require_equal_weights
from qerl_bench.train.lag import Lag
from qerl_bench.train.memory_plan import planned_before
from qerl_bench.train.no_signal import no_signal_message
from qerl_bench.train.nonfinite import blaming
from qerl_bench.train.recorded_passes import recorded_passes
from qerl_bench.train.rollout_records import TokenColumns, kept_records
from qerl_bench.train.update import make_optimizer, update
from qerl_core.checks import TrainingStopped
from qerl_core.metrics import compute
from qerl_core.options.fingerprint import as_dict
from qerl_core.process import energy
from qerl_core.process.device import PhaseTimer
from qerl_core.process.out_of_memory import memory_for
from qerl_core.process.progress import StepProgress
from qerl_core.process.termination import stop_by, terminations_noted
from qerl_core.records import Group, numbered
from qerl_core.rundir.run_dir import RunDir
from qerl_core.seeding import derive

log = logging.getLogger(__name__)


@contextmanager
def trained(experiment: Experiment, cfg: DictConfig, world: World = ALONE) -> Iterator[RunDir | None]:
    """Run, or continue, one experiment in its run directory. `cfg` is the resolved config it was built from.

    All ranks of `world` call this; rank 0 writes the run. Gives its folder, finished, to be looked at; None on other
    ranks, and if another process has finished it.
    """
    require_places(experiment, world)
    device = prepare_device(experiment.device, experiment.quant)
    with RunDir(world.folder(experiment.run_dir), cfg) as run:
        if world.from_first(lambda: run.finished):
            log.info("%s was finished by another process", run.path)
            yield None
            return
        experiment.check_model()
        for line in [*opening(experiment), *run_estimate_lines(experiment, cfg, device)] if world.first else ():
            log.info(line)
        if world.size == 1:
            run.meter(partial(energy.counter, device))
        with set_up(experiment, experiment.engine, run, device, world) as setup:
            names = experiment.quant.name, experiment.quantizer.name
            with run.replacing("layers.parquet") as file:
                write_layers(file, setup.policy.layers, *names, setup.policy.kernels)
            run_steps(setup, as_dict(cfg))
            collapsed = collapse(run.metrics(), math.log(len(setup.policy.tokenizer))) if world.first else None
        if not world.first:
            yield None
            return
        run.finish(collapsed, best_checkpoint(run))
        if collapsed:
            log.warning("%s: training has destroyed the policy: %s. Use a smaller optim.lr", run.path, collapsed)
        yield run


def run_steps(setup: Setup, config: dict[str, Any]) -> None:
    """Make all steps that the run does not have yet, with an evaluation before the first and after the last.

    With steps=0 the one evaluation of the base is all.
    """
    experiment, policy, engine, run, state, world = setup
    if experiment.algo.on_policy:  # refuse prompts that are too long now, not at the step that draws them
        engine.require_room(experiment.task.stored_prompts(), rollout_sampling(experiment, step=1))
    optimizer = make_optimizer(policy, experiment.optim)
    first = world.from_first(run.resume_step)
    state.size, state.passes = planned_before(run), recorded_passes(experiment, policy)
    lag = Lag(policy.trainable, experiment.rollout.lag)
    if first > 0:
        trainer_state.load_checkpoint(experiment.run_dir, run, policy, optimizer, lag, state)
        log.info("continuing after step %d", first)
    require_equal_weights(policy.model, world)
    make_mirror = experiment.logger.mirror if world.first else no_mirror
    rollout = experiment.rollout
    with (
        make_mirror(run.path, run.metrics(), config) as mirror,
        on_base_of(experiment.sampled, "rollout.quant", experiment, policy, engine, state) as (other, sampler),
    ):
        sampled, copies = experiment.sampled.quant, 1 + (sampler is not engine) + rollout.merge
        weights = {"quant": sampled.name, "activations": sampled.activations} | kv_record(**vars(policy.kv.kinds))
        weights |= {"copies_of_weights": copies} if copies > 1 else {}
        if rollout.merge:
            assert other.merging is not None
            sampler = MergingEngine(sampler, other.merging)
        run.write("engine.json", json.dumps(sampler.record() | weights, indent=1))
        prompts = experiment.task.train_prompts(1, experiment.rollout.prompts_per_step, experiment.seed)
        run.write("prompt.txt", policy.text_of(prompts[0]))
        if first == 0:
            evaluate_and_log(setup, mirror, 0)
        with StepProgress(first, experiment.steps) as progress, terminations_noted(experiment.save_on_term) as noted:
            for step in range(first + 1, experiment.steps + 1):
                state.shortages.begin(step)
                step_metrics = train_step(setup._replace(engine=sampler), optimizer, lag, step)
                run.log("train", step, step_metrics)
                mirror.log("train", step, step_metrics)
                progress.report(step, step_metrics)
                if is_whole(experiment.eval, step):
                    evaluate_and_log(setup, mirror, step)
                elif is_due(experiment.eval, step, experiment.steps, experiment.save_every):
                    log_validation(run, mirror, step, validate(setup, step))
                state.shortages.agree(world)
                signum = noted.on_any(world.gather)
                if trainer_state.is_saved(experiment, step) or signum:
                    require_equal_weights(policy.model, world)
                    kept = trainer_state.gather_trained(policy, optimizer, lag, world.first)
                    if world.first:
                        with memory_for("checkpoint"), run.checkpoint(step) as folder:
                            trainer_state.save_checkpoint(folder, experiment, policy, kept, lag, state, run, step)
                        drop_checkpoints(experiment.checkpoints.keep, run)
                        run.foresee_room(trainer_state.checkpoints_to_come(experiment, step))
                if signum:
                    raise stop_by(signum)
            if signum := noted.on_any(world.gather):  # which came while the last step was saved
                raise stop_by(signum)
        if experiment.steps:
            evaluate_and_log(setup, mirror, experiment.steps)
        if world.first:
            drop_checkpoints(experiment.checkpoints.keep, run)


def drop_checkpoints(keep: int | None, run: RunDir) -> None:
    if keep is not None:
        run.keep_checkpoints(keep, best_checkpoint(run))


def train_step(setup: Setup, optimizer: torch.optim.Optimizer, lag: Lag, step: int) -> dict[str, float]:
    """One step: a new batch, and one or more optimizer updates on it. Returns all metrics of the step."""
    experiment, policy, engine, run, state, world = setup
    algo = experiment.algo
    step_metrics: dict[str, float] = {}
    noise_begins = algo.on_policy and dose.begins(policy.noise.controller, step)
    timer = PhaseTimer(str(policy.device.type))
    with timer("step"):
        if algo.on_policy:
            with lag.sampling() as behind:
                groups, everything, step_metrics = collect_rollouts(experiment, policy, engine, step, timer, world)
                if noise_begins:
                    with timer("dose"):
                        sampling = rollout_sampling(experiment, step)
                        given = experiment, policy, engine, everything, sampling, world, state.size
                        step_metrics |= dose.first_dose(*given)
            step_metrics |= behind
            if step == 1 and world.first:
                formats.report_rollouts(run, experiment.task, everything)
            batch = rollout_batch(groups, algo, policy)
            step_metrics |= policy.noise.controller.update(step, step_metrics["entropy"])
        else:
            groups, batch = [], demonstration_batch(experiment.task, experiment, policy, step)
        columns: dict[int, TokenColumns] = {}
        try:
            with timer("train"):
                take_counts(policy)  # of what was sampled since
                step_metrics |= update(experiment, policy, optimizer, batch, run, step, world, columns, state)
                step_metrics |= shares(world.gather(take_counts(policy)))
        finally:  # completions of a step that failed are needed to look into it
            kept = groups[: experiment.train.kept_groups]
            advantages = batch.advantages.tolist()
            run.append("rollouts.jsonl", kept_records(step, kept, advantages, columns, policy.tokenizer.batch_decode))
    if noise_begins:
        step_metrics |= dose.trained_kl(experiment, step_metrics)
        log.info(dose.summary_line(step, step_metrics))
    step_metrics |= {f"time/{phase}_s": seconds for phase, seconds in timer.seconds.items()}
    step_metrics["time/idle_s"] = 2 * timer.seconds["step"] - sum(timer.seconds.values())
    step_metrics["packed_share"] = policy.packed_share
    step_metrics["speed/train_tok_s"] = int(batch.lengths.sum()) / timer.seconds["train"]
    if algo.on_policy:
        experiment.importance_sampling.warn_if_low_ess(step, step_metrics["mismatch/ess"])
        step_metrics["speed/rollout_tok_s"] = step_metrics["completions/tokens"] / timer.seconds["rollout"]
    phases = ("rollout", "train") if algo.on_policy else ("train",)
    memory = {f"memory/{phase}_gib": timer.peak_gib[phase] for phase in phases}
    memory |= {f"memory/{phase}_reserved_gib": timer.reserved_gib[phase] for phase in phases if timer.reserved_gib}
    return step_metrics | largest(world, memory | {"memory/peak_gib": max(timer.peak_gib.values())})


def rollout_sampling(experiment: Experiment, step: int) -> Sampling:
    """How the completions of one step are sampled."""
    seed = derive(experiment.seed, "rollout", step)
    return dose.group_sampling(experiment.rollout, experiment.task.max_completion_tokens, seed)


def collect_rollouts(
    experiment: Experiment, policy: Policy, engine: RolloutEngine, step: int, timer: PhaseTimer, world: World = ALONE
) -> tuple[list[Group], list[Group], dict[str, float]]:
    """Sample and grade completions. Returns the groups to train on, all groups, and the metrics of the rollout.

    Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2; algo.max_resampling_rounds > 0): groups without signal are
    dropped, and new prompts are sampled until there are enough groups with signal. Left out: sampling ahead during
    training, and deciding by accuracy instead of reward.
    """
    algo, task, rollout, noise = experiment.algo, experiment.task, experiment.rollout, experiment.noise
    sampling = rollout_sampling(experiment, step)
    grade = partial(experiment.reward.rewards, task, seed=derive(experiment.seed, "reward", step))
    all_groups: list[Group] = []
    kept_groups: list[Group] = []
    used_prompt_ids: set[str] = set()
    noise_reports: list[NoiseReport] = []
    sync_reports: list[dict[str, float]] = []
    rounds = 0
    while rounds <= algo.max_resampling_rounds and len(kept_groups) < rollout.prompts_per_step:
        seed = experiment.seed if rounds == 0 else derive(experiment.seed, "refill", rounds)
        prompts = task.train_prompts(step, rollout.prompts_per_step, seed)
        prompts = numbered(prompt for prompt in prompts if prompt.id not in used_prompt_ids)
        if not prompts:
            break
        rounds += 1
        used_prompt_ids.update(prompt.id for prompt in prompts)
        rollouts = []
        for draw, prompts_of_draw in noise.draws(prompts, len(noise_reports)):
            with timer("sync"):
                noise_context = policy.noise.for_rollout(step, draw)
            with noise_context as report:  # the norm scales carry this draw of noise until the end of the block
                noise_reports.append(report)
                with timer("sync"):
                    sync_reports.append(engine.sync(prompts_of_draw))
                with timer("rollout"), blaming(f"step {step}, sampling"):
                    rollouts += engine.generate(prompts_of_draw, sampling)
        with timer("reward"):
            graded = world.split(grade, rollouts)
        rewards = all_checked(graded, f"task={task.name} reward={experiment.reward.name}", rollouts)
        for start in range(0, len(rollouts), rollout.group_size):
            of_prompt = slice(start, start + rollout.group_size)
            all_groups.append(Group(rollouts=rollouts[of_prompt], rewards=rewards[of_prompt]))
        kept_groups = [group for group in all_groups if group.has_signal or algo.max_resampling_rounds == 0]
    if not kept_groups and algo.on_no_signal == "stop":
        raise TrainingStopped(no_signal_message(all_groups, rounds))
    kept_groups = (kept_groups or all_groups)[: rollout.prompts_per_step]
    with timer("sync"):
        memory_metrics = engine.sleep()
    rollout_metrics = compute.rollout_metrics(all_groups)
    rollout_metrics |= {"dynamic/refills": rounds - 1, "dynamic/groups_kept": len(kept_groups)}
    rollout_metrics |= compute.sync_metrics(sync_reports) | memory_metrics | noise_metrics(noise_reports)
    return kept_groups, all_groups, rollout_metrics


def evaluate_and_log(setup: Setup, mirror: MetricsMirror, step: int) -> None:
    experiment, run = setup.experiment, setup.run
    with_eval = replace(experiment, eval=evaluation_after(experiment.eval, step))
    if scores := evaluate(setup._replace(experiment=with_eval), step, untrained=step == 0):
        last = step == experiment.steps > 0
        metrics = metrics_of(scores) | (answers_in_other_formats(setup, step) if last else {})
        run.log("eval", step, metrics)
        mirror.log("eval", step, metrics)
        if is_on(experiment.eval, experiment.steps, experiment.save_every):
            validation = validation_of_whole(experiment.eval, experiment.task, run, step)
            log_validation(run, mirror, step, validation)
