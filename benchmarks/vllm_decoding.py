"""Tokens a second that vLLM samples with random weights, on the loads of decoding.py and in its columns.

    python benchmarks/vllm_decoding.py [--out FILE] [--shape 7b] [--format nvfp4] [--rank 32]
        [--batches 1 8 32] [--group 8 --group-batches 64] [--ragged 512 1024] [--rows 1024] [--memory 0.85]

NVFP4 and MXFP4 are compressed-tensors checkpoints without values (`load_format="dummy"`), whose kernels take as long as
with them; the adapter is a real one, of random numbers. vLLM keeps its defaults, with graphs and compilation, but
forgets its prompts before each rollout, so that it reads the prompt of a group once and not never. It may sample --rows
completions at a time. Numbers are medians of repeats, after a first that is left out.
"""

# vLLM is installed in an environment without a type checker.
# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from decoding import COLUMNS, SHAPES, even_prompts, even_row, ragged_load, ragged_row, ragged_task
from peft import LoraConfig
from safetensors.torch import save_file
from timing import LINEAR, argument_parser, print_rows, write_rows

from qerl_bench.config import build, compose
from qerl_bench.experiment_spec import Experiment
from qerl_bench.quant.export import config_entry


class Vllm:
    """A vLLM with random weights in the shape of a model, which samples completions of given lengths."""

    def __init__(self, experiment: Experiment, rank: int, folder: Path, options: argparse.Namespace) -> None:
        from vllm import LLM

        model: Any = experiment.model
        write_config(experiment, folder)
        self.request = adapter_request(model.without_weights(), rank, folder / "adapter") if rank > 0 else None
        lora: dict[str, Any] = {"enable_lora": True, "max_lora_rank": max(rank, 8), "max_loras": 1} if rank > 0 else {}
        longest = max(options.new, options.limit if options.ragged else 0)
        self.llm: Any = LLM(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=options.prompt + longest,
            gpu_memory_utilization=options.memory, max_num_seqs=options.rows, enable_prefix_caching=True, **lora,
        )  # fmt: skip

    def seconds(self, prompts: list[list[int]], lengths: list[int]) -> float:
        """Of one rollout, of which `lengths` has the samples of a prompt side by side."""
        from vllm import SamplingParams

        samples = len(lengths) // len(prompts)
        asked = [{"prompt_token_ids": ids} for ids in prompts for _ in range(samples)]
        wanted = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
        assert self.llm.reset_prefix_cache(), "vLLM still uses its prompts"
        started = time.perf_counter()
        outputs = self.llm.generate(asked, wanted, lora_request=self.request, use_tqdm=False)
        taken = time.perf_counter() - started
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
        return taken


def write_config(experiment: Experiment, folder: Path) -> None:
    """A checkpoint without weights."""
    model: Any = experiment.model
    config = model.transformers_config()
    config.architectures = [type(model.without_weights()).__name__]
    entries = config.to_dict() | {"dtype": "bfloat16"}
    if experiment.quant.name != "bf16":
        entries["quantization_config"] = config_entry(experiment.quant, ["lm_head"], "bfloat16")
    (folder / "config.json").write_text(json.dumps(entries))


def adapter_request(model: Any, rank: int, folder: Path) -> Any:
    """An adapter for all linear layers of the blocks of `model`, whose parameters may be on the meta device."""
    from vllm.lora.request import LoRARequest

    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in LINEAR:
            rows, columns = module.weight.shape
            key = f"base_model.model.{name}"
            tensors[f"{key}.lora_A.weight"] = 0.01 * torch.randn(rank, columns, dtype=torch.bfloat16)
            tensors[f"{key}.lora_B.weight"] = 0.01 * torch.randn(rows, rank, dtype=torch.bfloat16)
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=LINEAR, task_type="CAUSAL_LM")
    config.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors")
    return LoRARequest("random", 1, str(folder))


def measure(
    vllm: Vllm, batches: Sequence[tuple[int, int]], prompt: int, new: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Batches of (completions, group), each completion of `new` tokens."""
    for batch, group in batches:
        ids = even_prompts(batch // group, prompt, batch)
        vllm.seconds(ids, [new] * batch)
        rounds = [[vllm.seconds(ids, [n] * batch) for n in (1, new)] for _ in range(repeats)]
        yield even_row(batch, group, prompt, new, rounds)


def measure_ragged(vllm: Vllm, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rollouts of completions whose lengths task=shape draws."""
    task = ragged_task(options)
    for count in options.ragged:
        ids, lengths = ragged_load(task, count)
        vllm.seconds(ids, lengths)
        yield ragged_row(task, lengths, [vllm.seconds(ids, lengths) for _ in range(options.ragged_repeats)])


def measure_all(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import vllm

    started = time.perf_counter()
    case = {"shape": options.shape, "format": options.format, "rank": options.rank}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = case | {"gpu": gpu, "vllm": vllm.__version__} | dict.fromkeys(COLUMNS) | {"way": "vllm"}
    words = [f"quant={options.format}", f"model=shape/{options.shape}", "task=shape", "eval=none", *options.words]
    batches = [(batch, 1) for batch in options.batches]
    batches += [(batch, options.group) for batch in options.group_batches]
    with tempfile.TemporaryDirectory() as folder:
        engine = Vllm(build(compose(words)), options.rank, Path(folder), options)
        rows = measure(engine, batches, options.prompt, options.new, options.repeats)
        for row in itertools.chain(rows, measure_ragged(engine, options)):
            print(f"[{time.perf_counter() - started:.0f} s]", row, flush=True)
            yield about | row


def main(words: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--format", choices=("bf16", "nvfp4", "mxfp4"), default="nvfp4")
    parser.add_argument("--rank", type=int, default=32, help="of the adapter, 0 for none")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--group", type=int, default=8, help="completions of one prompt in --group-batches")
    parser.add_argument("--group-batches", type=int, nargs="*", default=[64, 128, 256], help="batches of groups")
    parser.add_argument("--ragged", type=int, nargs="*", default=[512, 1024], help="completions of ragged rollouts")
    parser.add_argument("--ragged-repeats", type=int, default=1, help="of a ragged rollout, which takes a minute")
    parser.add_argument("--mean", type=int, default=600, help="tokens of a ragged completion")
    parser.add_argument("--limit", type=int, default=4096, help="most tokens of a ragged completion")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1024, help="completions that vLLM may sample at a time")
    parser.add_argument("--memory", type=float, default=0.85, help="share of the GPU's memory that vLLM takes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--words", nargs="*", default=[], help="of another model: model.layers=2")
    options = parser.parse_args(words)
    if min(options.new - 1, options.repeats, options.ragged_repeats, options.group) < 1:
        parser.error("--new must be above 1; --repeats, --ragged-repeats and --group at least 1")
    if any(count % 8 for count in options.ragged) or any(batch % options.group for batch in options.group_batches):
        parser.error("--ragged must be multiples of 8, --group-batches of --group")
    print_rows(write_rows(measure_all(options), options.out), leave_out=("gpu", "vllm"))


if __name__ == "__main__":
    main()
