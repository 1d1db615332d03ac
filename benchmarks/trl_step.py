"""Seconds of whole GRPO steps in TRL with vLLM, on the load of experiment=speed/step.

    python benchmarks/trl_step.py --fixed [--out FILE] [--shape 7b] [--rank 32] [--steps 3]
        [--rows 4] [--no-checkpointing] [--attention sdpa] [--words rollout.prompts_per_step=8]

64 prompts of 256 tokens and eight completions of each, with the lengths that task=shape draws for seed 0: geometric,
mean 600, at most 4,096; with --fixed all have 600. Random BF16 weights in the shape of a model, LoRA on the linear
layers of its blocks, rewards of 0 and 1 that give every completion a gradient, no KL penalty, one update a step: like

    python src/run.py experiment=speed/step quant=bf16 lora.rank=32 steps=3 save_every=3 [task.lengths=fixed]

vLLM samples in the same process (TRL's colocate mode) and is told the length of each completion. Some settings help TRL
and some do not, so compare with the fastest of several: --rows is its per_device_train_batch_size, and
--no-checkpointing keeps activations. TRL pads all completions of a step to the longest, so that with geometric lengths
it computes several times as many tokens; with --fixed there is no padding, which is the fairer comparison. Off here as
in our load, but on by default in TRL: the forward pass that corrects for vLLM's rounding.

One row a step, of which the first compiles. `rest_s` is everything but sampling and copying weights to vLLM: mostly
training, but also tokenizing, rewards and logging. `peak_gib` has what vLLM takes whether it needs it or not
(--vllm-memory), so it is not what our runs call so. Needs TRL 1.16 and datasets, on a GPU beside vLLM 0.22 to 0.31: the
extra `peers` has TRL, but cannot be installed together with `vllm`. Without a GPU or vLLM transformers samples, and all
completions have the length of the longest: that shows only that it runs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from timing import LINEAR, argument_parser, print_rows, write_rows
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from qerl_bench.config import build, compose
from qerl_bench.experiment_spec import Experiment
from qerl_core.process.device import now, peak_gib, reset_peak, resolve_device
from qerl_core.records import Prompt
from qerl_core.rundir.environment import versions

UNKNOWN, END = "<unknown>", "<end>"
LIBRARIES = ("trl", "vllm", "transformers", "torch")


class Clock(TrainerCallback):
    """Seconds of the parts that are `timed` and of the rest, for each step; printed when it ends."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.parts: dict[str, float] = {}
        self.rows: list[dict[str, Any]] = []
        self.started = 0.0

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            started = now(self.device)
            result = call(*args, **more)
            self.parts[name] = self.parts.get(name, 0.0) + now(self.device) - started
            return result

        return run

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.started = now(self.device)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        ended = now(self.device)
        step, rest = ended - self.started, ended - self.started - sum(self.parts.values())
        parts = {name: self.parts.get(name) for name in ("rollout_s", "sync_s")}
        self.rows.append({"step": len(self.rows) + 1, "step_s": step, **parts, "rest_s": rest})
        self.rows[-1]["peak_gib"] = peak_gib(self.device)
        print(self.rows[-1], flush=True)
        self.parts, self.started = {}, now(self.device)


class Load:
    """What TRL is asked in each step: prompts as words, the length of each completion and its reward."""

    def __init__(self, experiment: Experiment, steps: int) -> None:
        task: Any = experiment.task
        self.group, count = experiment.rollout.group_size, experiment.rollout.prompts_per_step
        asked = [task.train_prompts(step, count, experiment.seed) for step in range(1, steps + 1)]
        prompts: list[Prompt] = [prompt for of_step in asked for prompt in of_step]
        self.rows = [{"prompt": " ".join(map(str, one.token_ids or ())), "right": one.answer} for one in prompts]
        self.lengths = [[length for one in of_step for length in one.new_tokens or ()] for of_step in asked]
        self.longest, self.prompt_tokens = max(map(max, self.lengths)), task.prompt_tokens
        self.completions = count * self.group

    def reward(self, right: Sequence[str], **_: Any) -> list[float | None]:
        """Of completions in the order of their prompts, the samples of a prompt side by side."""
        return [float(answers[number % self.group]) for number, answers in enumerate(right)]


def number_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A token id for each number, so that a prompt of numbers is its own token ids.

    The last two ids are special, and no numbers: special tokens are cut out of the middle of other words.
    """
    words = {str(number): number for number in range(vocabulary - 2)} | {UNKNOWN: vocabulary - 2, END: vocabulary - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, unk_token=UNKNOWN)


def with_lengths(generate: Callable[..., Any], lengths: Iterator[list[int]]) -> Callable[..., Any]:
    """vLLM's `generate`, which does not stop by itself, with the length of each request of a step."""

    def run(prompts: list[Any], sampling_params: Any, **more: Any) -> Any:
        requests = []
        for tokens in next(lengths):
            one = sampling_params.clone()
            one.max_tokens = tokens
            requests.append(one)
        assert len(requests) == len(prompts), (len(requests), len(prompts))
        return generate(prompts, sampling_params=requests, **more)

    return run


def trainer_of(experiment: Experiment, options: argparse.Namespace, folder: Path, clock: Clock) -> GRPOTrainer:
    load, on_vllm = Load(experiment, options.steps), uses_vllm(clock.device)
    model, _ = experiment.model.load(None, clock.device)
    model.set_attn_implementation(options.attention)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.name_or_path = model.config._name_or_path = str(folder)
    exact = {"ignore_eos": True, "detokenize": False} if on_vllm else {"min_new_tokens": load.longest}
    arguments = GRPOConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=options.rows, num_generations=load.group,
        gradient_accumulation_steps=load.completions // options.rows, max_steps=options.steps,
        max_completion_length=load.longest, bf16=clock.device == "cuda", use_cpu=clock.device == "cpu",
        gradient_checkpointing=options.checkpointing, beta=0.0, temperature=1.0, shuffle_dataset=False, report_to=[],
        save_strategy="no", logging_steps=1, disable_tqdm=True, use_vllm=on_vllm, vllm_mode="colocate",
        vllm_gpu_memory_utilization=options.vllm_memory, vllm_max_model_length=load.prompt_tokens + load.longest,
        vllm_importance_sampling_correction=False, generation_kwargs=exact,
    )  # fmt: skip
    if on_vllm:
        rollouts: Any = import_module("trl.generation.vllm_generation")
        rollouts.LLM = partial(rollouts.LLM, load_format="dummy", skip_tokenizer_init=True)
    tokenizer = number_tokenizer(model.config.vocab_size)
    assert {len(tokenizer(row["prompt"])["input_ids"]) for row in load.rows} == {load.prompt_tokens}
    adapter = LoraConfig(r=options.rank, lora_alpha=options.rank, target_modules=LINEAR, task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        model=model, reward_funcs=load.reward, args=arguments, train_dataset=Dataset.from_list(load.rows),
        processing_class=tokenizer, peft_config=adapter, callbacks=[clock],
    )  # fmt: skip
    if on_vllm:
        made = trainer.vllm_generation
        made.llm.generate = clock.timed("rollout_s", with_lengths(made.llm.generate, iter(load.lengths)))
        made.sync_weights = clock.timed("sync_s", made.sync_weights)
    else:
        trainer._generate = clock.timed("rollout_s", trainer._generate)
    return trainer


def uses_vllm(device: str) -> bool:
    return device == "cuda" and find_spec("vllm") is not None


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    words = ["experiment=speed/step", f"model=shape/{options.shape}", "quant=bf16", *options.words]
    experiment = build(compose([*words, *(["task.lengths=fixed"] if options.fixed else [])]))
    device = resolve_device("auto")
    clock = Clock(device)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(experiment, options, Path(folder), clock)
        startup = time.perf_counter() - started
        reset_peak(device)
        trainer.train()
    about = {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "sampler": "vllm" if uses_vllm(device) else "transformers", **versions(LIBRARIES), "shape": options.shape,
        "rank": options.rank, "lengths": "fixed" if options.fixed else "geometric", "rows": options.rows,
        "checkpointing": options.checkpointing, "attention": options.attention, "startup_s": startup,
    }  # fmt: skip
    return [about | row for row in clock.rows]


def main(words: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", default="7b", help="an option of model=shape/")
    parser.add_argument("--rank", type=int, default=32, help="of the adapter")
    parser.add_argument("--steps", type=int, default=3, help="the first compiles")
    parser.add_argument("--rows", type=int, default=4, help="completions of a micro-batch")
    parser.add_argument("--fixed", action="store_true", help="completions of equal length")
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false", help="keep activations")
    parser.add_argument("--attention", default="sdpa", help="transformers' attention implementation")
    parser.add_argument("--vllm-memory", type=float, default=0.3, help="share of the GPU's memory that vLLM takes")
    parser.add_argument("--words", nargs="*", default=[], help="of another load: rollout.prompts_per_step=8")
    options = parser.parse_args(words)
    print_rows(write_rows(measure(options), options.out))


if __name__ == "__main__":
    main()
