"""One model trained by TRL and by us: loss and gradient of the same completions, what is learned, seconds and memory.

    python benchmarks/beside_trl.py FOLDER model=FILE.gguf task.train_file=FILE task.eval_file=FILE [WORD ...]
        [--parts same ours trl table] [--seeds 0 1] [--minutes 9] [--rows 16] [--no-checkpointing] [--trl KEY=JSON ...]

Both get the same weights, prompts in the same order, reward (1 for the right answer, nothing else), loss (the mean over
the tokens of a step, TRL's default), rate, Adam, adapter and batch: those of `WORDS`, which further words change.

same    TRL and we make three updates on the completions of our first step, from the same adapter. Exit code 1 if a loss
        or the norm of a gradient differs by more than 1 % of the largest. From the second update on ratios are not 1,
        and numbers depend on the update before.
ours    a run for each seed, in FOLDER/runs
trl     TRL's for each seed, sampling with transformers. After --minutes it stops, with exit code 3: the same command
        goes on. Then our evaluation asks its adapter what it asks our runs.
table   FOLDER/table.csv and table.md (`beside_trl_table.py`)

Runs that are finished are not repeated. Some settings of TRL help it: --rows is its per_device_train_batch_size,
--no-checkpointing keeps activations, --trl gives further fields of its GRPOConfig. Needs TRL 1.16 and datasets, and one
visible GPU, for its Trainer would use them all; if two start at once, a MASTER_PORT for each.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from beside_trl_table import LIBRARIES, write_table
from datasets import Dataset
from peft import LoraConfig, PeftModel
from timing import LINEAR, append_rows, argument_parser, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl_step import Clock

from qerl_bench.config import build, compose
from qerl_bench.evaluation import evaluate
from qerl_bench.experiment import collect_rollouts, rollout_batch
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model_setup import base_checkpoint
from qerl_bench.run_setup import prepare_device, set_up
from qerl_bench.task.chat_template import texts_of
from qerl_bench.train.update import make_optimizer, update
from qerl_core.checks import require
from qerl_core.process.device import PhaseTimer, reset_peak
from qerl_core.process.installation import run_command
from qerl_core.process.terminal import log_to_stderr
from qerl_core.records import Prompt, Rollout
from qerl_core.rundir.environment import versions
from qerl_core.rundir.run_dir import RunDir

TASK = ["task=gsm8k", "task.answer_format=boxed", "task.format_weight=0", "task.max_completion_tokens=640"]
WORDS = [
    *("algo=dapo", "algo.epsilon_high=0.2", "algo.max_resampling_rounds=0", "algo.overlong_share=0"),
    *("rollout.prompts_per_step=32", "rollout.group_size=8", "lora.rank=32", "quant=bf16", "steps=24", "save_every=24"),
    *("optim.lr=1e-4", "optim.warmup_steps=0", "eval.every=0"),
]
UPDATES, TOLERANCE = 3, 0.01


class StoppingClock(Clock):
    """Adds each step to a CSV file, and ends training with a checkpoint when the time is over."""

    def __init__(self, device: str, file: Path, ends: float) -> None:
        super().__init__(device)
        self.file, self.ends = file, ends

    def on_step_end(self, args: Any = None, state: Any = None, control: Any = None, **more: Any) -> None:
        super().on_step_end()
        append_rows([{**self.rows[-1], "step": state.global_step}], self.file)
        if time.monotonic() > self.ends:
            control.should_training_stop = control.should_save = True


def plain_model(experiment: Experiment) -> tuple[Any, Any]:
    """The weights of `experiment` as transformers loads them, and their tokenizer."""
    folder = base_checkpoint(experiment.model, experiment.task, experiment.root) or experiment.model.folder()
    assert folder is not None, "give a model that has a folder or a GGUF file"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, experiment.model.dtype))
    return model, AutoTokenizer.from_pretrained(folder)


def prompts_of(experiment: Experiment, steps: int) -> list[Prompt]:
    count, seed = experiment.rollout.prompts_per_step, experiment.seed
    return [one for step in range(1, steps + 1) for one in experiment.task.train_prompts(step, count, seed)]


def trainer_of(
    experiment: Experiment,
    options: argparse.Namespace,
    folder: Path,
    prompts: Sequence[Prompt],
    adapter: Path | None = None,
    fields: dict[str, Any] | None = None,
    **more: Any,
) -> GRPOTrainer:
    """TRL's trainer with what `experiment` says, from the adapter in the folder `adapter` or a new one.

    `fields` are further ones of its config, `more` further arguments.
    """
    algo: Any = experiment.algo
    task, optim, rollout, device = experiment.task, experiment.optim, experiment.rollout, more.pop("device")
    model, tokenizer = plain_model(experiment)
    listed = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])}
    by_id = {one.id: one for one in prompts}

    def reward(completion_ids: list[list[int]], id: list[str], **_: Any) -> list[float | None]:
        """Of the text that we grade; TRL's own lacks special tokens in its middle."""
        ended = [ids[-1] in ends for ids in completion_ids]
        texts = texts_of(tokenizer, [ids[: len(ids) - end] for ids, end in zip(completion_ids, ended, strict=True)])
        graded = zip(id, texts, ended, strict=True)
        return [task.reward(by_id[name], text, finished).total for name, text, finished in graded]

    arguments = GRPOConfig(**{
        "output_dir": str(folder / "out"), "max_steps": experiment.steps, "per_device_train_batch_size": options.rows,
        "gradient_accumulation_steps": rollout.prompts_per_step * rollout.group_size // options.rows,
        "num_generations": rollout.group_size, "max_completion_length": task.max_completion_tokens,
        "temperature": rollout.temperature, "learning_rate": optim.lr, "lr_scheduler_type": "constant",
        "adam_beta2": optim.beta2, "weight_decay": optim.weight_decay, "max_grad_norm": optim.max_grad_norm,
        "loss_type": "dapo", "epsilon": algo.epsilon_low, "epsilon_high": algo.epsilon_high, "beta": 0.0,
        "bf16": experiment.model.dtype == "bfloat16", "use_cpu": device == "cpu", "seed": experiment.seed,
        "gradient_checkpointing": options.checkpointing, "shuffle_dataset": False, "report_to": [],
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
    } | dict(options.trl) | (fields or {}))  # fmt: skip
    if adapter is None:
        rank, alpha = experiment.lora.rank, experiment.lora.alpha  # type: ignore[attr-defined]
        more["peft_config"] = LoraConfig(r=rank, lora_alpha=alpha, target_modules=LINEAR, task_type="CAUSAL_LM")
    else:
        model = PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    rows = [{"prompt": list(one.messages), "id": one.id} for one in prompts]
    return GRPOTrainer(
        model=model, reward_funcs=reward, args=arguments, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, **more,
    )  # fmt: skip


def same(words: list[str], options: argparse.Namespace) -> bool:
    """Whether TRL and we find the same loss and gradient norm; both are in FOLDER/same.csv."""
    cfg, folder = compose([*words, f"steps={UPDATES}"]), options.folder / "same"
    experiment = build(cfg)
    device = prepare_device(experiment.device, experiment.quant)
    with RunDir(folder, cfg) as run, set_up(experiment, experiment.engine, run, device) as setup:
        policy, engine = setup.policy, setup.engine
        policy.save(folder)
        groups, _, _ = collect_rollouts(experiment, policy, engine, 1, PhaseTimer(device))
        require(any(group.has_signal for group in groups), "no rewards of a group differ; raise rollout.group_size")
        batch = rollout_batch(groups, experiment.algo, policy)
        sums = [(0.0, 0.0)]
        for updates in range(1, UPDATES + 1):
            policy.load(folder)
            specs = replace(experiment, train=replace(experiment.train, updates_per_batch=updates))
            found = update(specs, policy, make_optimizer(policy, experiment.optim), batch, run, 1)
            sums.append((updates * found["loss"], updates * found["grad_norm"]))
    rollouts: list[Rollout] = [one for group in groups for one in group.rollouts]
    del setup, policy, engine
    free(device)

    def given(prompts: Any, trainer: GRPOTrainer) -> dict[str, Any]:
        prompt_ids = [one.prompt_ids for one in rollouts]
        assert prompt_ids == trainer._tokenize_prompts(prompts)[0], "TRL writes the prompts with other tokens"
        return {"prompt_ids": prompt_ids, "completion_ids": [one.token_ids for one in rollouts], "logprobs": None}

    fields, prompts = {"num_iterations": UPDATES}, prompts_of(experiment, 1)
    trainer = trainer_of(
        experiment, options, folder, prompts, folder / "adapter", fields, device=device, rollout_func=given
    )
    trainer.train()
    theirs = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
    own = [[high - low for low, high in zip(before, after, strict=True)] for before, after in pairwise(sums)]
    rows = []
    for name, ours, peers in zip(("loss", "grad_norm"), zip(*own, strict=True), zip(*theirs, strict=True), strict=True):
        scale = max(map(abs, peers))  # a loss may come near 0
        require(scale > 0, f"{name} is 0 in TRL, and {ours} in ours")
        for number, (one, peer) in enumerate(zip(ours, peers, strict=True), 1):
            rows.append({"number": name, "update": number, "ours": one, "trl": peer, "gap": abs(one - peer) / scale})
    write_rows(rows, options.folder / "same.csv")
    tokens = sum(len(one.token_ids) for one in rollouts)
    print(f"{len(rollouts)} completions, {tokens} tokens", *rows, sep="\n")
    return all(row["gap"] <= TOLERANCE for row in rows)


def free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    reset_peak(device)


def run_trl(words: list[str], options: argparse.Namespace, ends: float) -> bool:
    """Whether the run of TRL is finished and evaluated; False if its time was over before."""
    cfg = compose(words)
    experiment = build(cfg)
    folder, device = trl_folder(options.folder, experiment.seed), prepare_device(experiment.device, experiment.quant)
    if not (folder / "trained").exists():
        checkpoint = get_last_checkpoint(str(folder / "out")) if (folder / "out").exists() else None
        keep_steps(folder / "steps.csv", 0 if checkpoint is None else int(checkpoint.rpartition("-")[2]))
        clock = StoppingClock(device, folder / "steps.csv", ends)
        prompts = prompts_of(experiment, experiment.steps)
        trainer = trainer_of(experiment, options, folder, prompts, callbacks=[clock], device=device)
        trainer._generate = clock.timed("rollout_s", trainer._generate)
        reset_peak(device)
        trainer.train(resume_from_checkpoint=checkpoint)
        (folder / "log.json").write_text(json.dumps(trainer.state.log_history, indent=1))
        if trainer.state.global_step < experiment.steps:
            return False
        trained: Any = trainer.model
        trained.save_pretrained(str(folder / "trained" / "adapter"))
        del trainer, trained, clock
        free(device)
    with RunDir(folder / "eval", cfg) as run:
        if not run.finished:
            with set_up(experiment, experiment.engine, run, device) as setup:
                evaluate(setup, 0, untrained=True)
                setup.policy.load(folder / "trained")
                evaluate(setup, experiment.steps)
            run.mark_finished(versions(LIBRARIES))
    return True


def keep_steps(file: Path, last: int) -> None:
    """Drop the rows of `file` after step `last`, which an interrupted process had made since its checkpoint."""
    rows = []
    if file.exists():
        with file.open() as lines:
            rows = [row for row in csv.DictReader(lines) if int(row["step"]) <= last]
    write_rows(rows, file)


def trl_folder(folder: Path, seed: int) -> Path:
    return folder / f"trl-s{seed}"


def main(arguments: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("folder", type=Path, help="for everything that is made; the same one continues")
    parser.add_argument("words", nargs="*", help="of a run: model=FILE.gguf task.train_file=FILE ...")
    parser.add_argument("--parts", nargs="+", default=["same", "ours", "trl", "table"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--minutes", type=float, default=9.0, help="after which TRL stops")
    parser.add_argument("--rows", type=int, default=16, help="completions of TRL's micro-batch")
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false", help="TRL keeps activations")
    parser.add_argument("--trl", nargs="*", default=[], type=pair, help="fields of GRPOConfig, KEY=JSON")
    options = parser.parse_intermixed_args(arguments)
    ends = time.monotonic() + 60 * options.minutes
    log_to_stderr()
    task = [] if any(word.startswith("task=") for word in options.words) else TASK
    words = [*task, *WORDS, f"root={options.folder}", *options.words]
    if "same" in options.parts and not same(words, options):
        sys.exit(f"loss or gradient norm differs by more than {TOLERANCE:.0%}: {options.folder}/same.csv")
    for seed in options.seeds:
        if "ours" in options.parts:
            subprocess.run([*run_command(), *words, f"seed={seed}"], check=True)
        if "trl" in options.parts and not run_trl([*words, f"seed={seed}"], options, ends):
            print("time is over; the same command continues")
            sys.exit(3)
    if "table" in options.parts:
        seeds = {seed: build(compose([*words, f"seed={seed}"])) for seed in options.seeds}
        write_table(
            options.folder, [(experiment, trl_folder(options.folder, seed)) for seed, experiment in seeds.items()]
        )


def pair(word: str) -> tuple[str, Any]:
    key, _, value = word.partition("=")
    return key, json.loads(value)


if __name__ == "__main__":
    main()
