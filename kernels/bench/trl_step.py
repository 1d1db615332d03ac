"""Seconds of a whole GRPO step in TRL with vLLM, on the load of experiment=speed/step.

    python kernels/bench/trl_step.py [--out FILE] [--shape 7b] [--rank 32] [--steps 3] [--rows 4] [--fixed]

64 prompts of 256 tokens and eight completions of each, with the lengths that task=shape draws for seed 0: geometric,
mean 600, at most 4,096; with --fixed all have 600. Random BF16 weights in the shape of a model, LoRA on the linear
layers of its blocks, rewards of 0 and 1 that give every completion a gradient, no KL penalty, one update a step: like

    python src/run.py experiment=speed/step quant=bf16 lora.rank=32 [task.lengths=fixed]

vLLM samples in the same process (TRL's colocate mode), and is told the length of each completion. TRL pads all
completions of a step to the longest; --rows is its per_device_train_batch_size. The first step compiles and is left
out; numbers are medians over the others. `rest_s` is what is neither sampling nor copying weights to vLLM: training.
`peak_gib` has the memory that vLLM takes whether it needs it or not (--vllm-memory).

Needs TRL, in the extra `peers`. Without vLLM transformers samples, and all completions have the length of the longest:
that shows only that it runs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from timing import argument_parser, print_rows, write_rows
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from qerl_bench.config import build, compose
from qerl_bench.device import now, peak_gib, reset_peak, resolve_device
from qerl_bench.experiment_spec import Experiment
from qerl_bench.records import Prompt

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Clock(TrainerCallback):
    """Seconds of each step, and of what is `timed` in it."""

    def __init__(self, device: str) -> None:
        self.device, self.steps, self.parts = device, [], {}
        self.started = 0.0

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            started = now(self.device)
            result = call(*args, **more)
            self.parts.setdefault(name, []).append(now(self.device) - started)
            return result

        return run

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self.started:
            self.started = now(self.device)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(now(self.device) - self.started)
        self.started = now(self.device)


def number_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A token id for each number, so that a prompt of numbers is its own token ids."""
    tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(vocabulary)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    last = str(vocabulary - 1)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=last, pad_token=last, unk_token="0")


def with_lengths(generate: Callable[..., Any], lengths: Iterator[list[int]]) -> Callable[..., Any]:
    """vLLM's `generate` that samples exactly so many tokens of each request of a step."""

    def run(prompts: list[Any], sampling_params: Any, **more: Any) -> Any:
        requests = []
        for tokens in next(lengths):
            one = sampling_params.clone()
            one.max_tokens = one.min_tokens = tokens
            requests.append(one)
        assert len(requests) == len(prompts), (len(requests), len(prompts))
        return generate(prompts, sampling_params=requests, **more)

    return run


def trainer_of(experiment: Experiment, options: argparse.Namespace, folder: Path, clock: Clock) -> GRPOTrainer:
    task: Any = experiment.task
    group = experiment.rollout.group_size
    device, on_vllm = resolve_device("auto"), find_spec("vllm") is not None
    model, _ = experiment.model.load(None, device)
    model.config.save_pretrained(folder)
    model.name_or_path = model.config._name_or_path = str(folder)
    asked = [task.train_prompts(step, experiment.rollout.prompts_per_step, 0) for step in range(1, options.steps + 1)]
    prompts: list[Prompt] = [prompt for of_step in asked for prompt in of_step]
    rows = [{"prompt": " ".join(map(str, one.token_ids or ())), "right": one.answer} for one in prompts]
    lengths = [[length for one in of_step for length in one.new_tokens or ()] for of_step in asked]
    limit = max(map(max, lengths))

    def reward(right: list[str], **_: Any) -> list[float | None]:
        return [float(answers[number % group]) for number, answers in enumerate(right)]

    batch = experiment.rollout.prompts_per_step * group
    exact = {"ignore_eos": True, "detokenize": False} if on_vllm else {"min_new_tokens": limit}
    arguments = GRPOConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=options.rows, num_generations=group,
        gradient_accumulation_steps=batch // options.rows, max_steps=options.steps, max_completion_length=limit,
        bf16=device == "cuda", use_cpu=device == "cpu", gradient_checkpointing=True, beta=0.0, temperature=1.0,
        shuffle_dataset=False, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
        use_vllm=on_vllm, vllm_mode="colocate", vllm_gpu_memory_utilization=options.vllm_memory,
        vllm_max_model_length=task.prompt_tokens + limit, vllm_importance_sampling_correction=False,
        generation_kwargs=exact,
    )  # fmt: skip
    if on_vllm:
        rollouts: Any = import_module("trl.generation.vllm_generation")
        rollouts.LLM = partial(rollouts.LLM, load_format="dummy", skip_tokenizer_init=True)
    vocabulary = model.config.vocab_size
    adapter = LoraConfig(r=options.rank, lora_alpha=options.rank, target_modules=LINEAR, task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=arguments, train_dataset=Dataset.from_list(rows),
        processing_class=number_tokenizer(vocabulary), peft_config=adapter, callbacks=[clock],
    )  # fmt: skip
    if on_vllm:
        made = trainer.vllm_generation
        made.llm.generate = clock.timed("rollout_s", with_lengths(made.llm.generate, iter(lengths)))
        made.sync_weights = clock.timed("sync_s", made.sync_weights)
    else:
        trainer._generate = clock.timed("rollout_s", trainer._generate)
    return trainer


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
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
    parts = {name: median(seconds[1:]) for name, seconds in clock.parts.items()}
    step = median(clock.steps[1:])
    yield {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "sampler": "vllm" if find_spec("vllm") is not None else "transformers",
        "shape": options.shape, "rank": options.rank, "rows": options.rows,
        "lengths": "fixed" if options.fixed else "geometric", "steps": options.steps - 1,
        "startup_s": startup, "step_s": step, "rollout_s": parts["rollout_s"], "sync_s": parts.get("sync_s"),
        "rest_s": step - sum(parts.values()), "peak_gib": peak_gib(device),
    }  # fmt: skip


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", default="7b", help="an option of model=shape/")
    parser.add_argument("--rank", type=int, default=32, help="of the adapter")
    parser.add_argument("--steps", type=int, default=3, help="the first is left out")
    parser.add_argument("--rows", type=int, default=4, help="completions of a micro-batch")
    parser.add_argument("--fixed", action="store_true", help="completions of equal length")
    parser.add_argument("--vllm-memory", type=float, default=0.4, help="share of the GPU's memory that vLLM takes")
    parser.add_argument("--words", nargs="*", default=[], help="of another load: rollout.prompts_per_step=8")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first is left out")
    print_rows(write_rows(measure(options), options.out))


if __name__ == "__main__":
    main()
