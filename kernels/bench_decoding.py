"""Tokens a second that engine=hf samples with random weights in the shape of a model: recorded steps beside sampling
through transformers, in the same process. Unlike the other benches it needs the whole project, and without a GPU it
only shows that it runs.

Every prompt is different and no completion stops early. Decode tokens/s leave out the time of a run for one token,
reading the prompts and drawing from them, so what recording costs is in them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from peft import get_peft_model
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from qerl_bench.config import Experiment, build, compose
from qerl_bench.device import now, peak_gib, reset_peak, resolve_device
from qerl_bench.engine import hf, hf_graph
from qerl_bench.engine.base import Sampling
from qerl_bench.kernel_choice import choose_kernels, fused_reason
from qerl_bench.policy import Policy
from qerl_bench.quantizer.apply import quantize_model
from qerl_bench.tokenizer import byte_tokenizer

SHAPES = {  # hidden, layers, heads, key heads, intermediate, vocabulary
    "7b": (3584, 28, 28, 4, 18944, 152064),
    "32b": (5120, 64, 40, 8, 27648, 152064),
    "dry": (64, 2, 4, 2, 128, 300),
}
WAYS: dict[str, Callable[..., list[hf.Completion]]] = {"recorded": hf_graph.decode, "transformers": hf.decode}
FEW = 12  # tokens of the slow way
WARM = 4


class RandomWeights:
    """Gives a model on the meta device normal weights, and norms of ones, when they are asked for."""

    def __init__(self, device: str) -> None:
        self.device = device

    def fill(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        for name in names:
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            shape = module.get_parameter(leaf).shape
            value = torch.ones(shape, device=self.device)
            if "norm" not in name:
                value.normal_(0, 0.02)
            setattr(module, leaf, torch.nn.Parameter(value.bfloat16(), requires_grad=False))


def random_policy(experiment: Experiment, shape: str, rank: int, device: str) -> Policy:
    """A policy with random weights in the format of `experiment`, packed layer by layer; rank 0 is no adapter."""
    hidden, layers, heads, kv_heads, intermediate, vocabulary = SHAPES[shape]
    config = Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model: PreTrainedModel = Qwen2ForCausalLM(config).to(torch.bfloat16)  # type: ignore[arg-type]
    model.model.rotary_emb = Qwen2RotaryEmbedding(config).to(device)
    weights = RandomWeights(device)
    reports = quantize_model(model, experiment.quant, source=weights)
    weights.fill(model, [name for name, parameter in model.named_parameters() if parameter.is_meta])
    model.requires_grad_(False)
    adapter: Any = None
    if rank > 0:
        adapter = get_peft_model(model, experiment.lora.peft_config())
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.01)
    model.eval()
    policy = Policy(model, byte_tokenizer(), adapter, reports, packing=False)
    policy.kernels = choose_kernels(model, reports, experiment.kernel)
    policy.fused = fused_reason(experiment.kernel, policy.device) is None
    policy.stop_ids = frozenset({-1})
    return policy


def seconds(way: str, policy: Policy, batch: int, prompt: int, new: int) -> tuple[float, float]:
    """How long one round takes, and its peak of memory in GiB."""
    device = policy.device.type
    vocabulary = min(256, policy.model.config.vocab_size)
    ids = torch.randint(vocabulary, (batch, prompt), generator=torch.Generator().manual_seed(batch)).tolist()
    sampling = Sampling(samples=1, temperature=1.0, max_tokens=new, seed=0)
    reset_peak(device)
    started = now(device)
    with torch.inference_mode():
        WAYS[way](policy, ids, sampling, list(range(batch)))
    return now(device) - started, peak_gib(device)


def measured(policy: Policy, way: str, batches: Sequence[int], prompt: int, new: int) -> Iterator[dict[str, Any]]:
    for batch in batches:
        seconds(way, policy, batch, prompt, min(new, WARM))  # compiles
        total, peak = seconds(way, policy, batch, prompt, new)
        read, _ = seconds(way, policy, batch, prompt, 1)
        yield {
            "way": way,
            "batch": batch,
            "prompt": prompt,
            "new": new,
            "read_s": read,
            "total_s": total,
            "step_ms": 1e3 * (total - read) / (new - 1),
            "decode_tok_s": batch * (new - 1) / (total - read),
            "peak_gib": peak,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--formats", nargs="+", default=["nvfp4", "bf16"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[32], help="of the adapter, 0 for none")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--slow", type=int, nargs="*", default=[64], help="batches also sampled through transformers")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--out", help="CSV file to write")
    options = parser.parse_args()
    import pandas as pd
    import transformers

    device = resolve_device("auto")
    gpu = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    rows = []
    started = time.perf_counter()
    for name in options.formats:
        for rank in options.ranks:
            words = (f"quant={name}", f"lora.rank={max(rank, 1)}", "model.dtype=bfloat16", "model.warm_start_steps=0")
            policy = random_policy(build(compose([*words, "eval=none"])), options.shape, rank, device)
            common = {"shape": options.shape, "format": name, "rank": rank, "gpu": gpu}
            common |= {"torch": torch.__version__, "transformers": transformers.__version__}
            plan = [("recorded", options.batches, options.new), ("transformers", options.slow, min(FEW, options.new))]
            for way, batches, new in plan:
                for row in measured(policy, way, batches, options.prompt, new):
                    rows.append(common | row)
                    print(f"[{time.perf_counter() - started:.0f} s]", name, rank, row, flush=True)
            del policy
            if device == "cuda":
                torch.cuda.empty_cache()
    table = pd.DataFrame(rows)
    if options.out:
        table.to_csv(options.out, index=False)
    print(table.drop(columns=["gpu", "torch", "transformers"]).to_string(index=False, float_format="{:.4g}".format))


if __name__ == "__main__":
    main()
