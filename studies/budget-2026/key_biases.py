"""What rounded keys cost with and without the biases of their layers, on committed answers; a CPU will do.

    python studies/budget-2026/key_biases.py model.id=FILE.gguf task.train_file=FILE \\
        task.eval_file=FILE > keys.csv

A model of the family Qwen2 adds a bias to each key, the same at every token but for its rotation. KL(unrounded ||
rounded) over the whole vocabulary, in nats a token, of keys in each kind, of keys from which the rotated bias is taken
before they are rounded and to which it is added after, and of values. On BF16's own answers to GSM8K at temperature 1,
which the first look at released models packed; computed in FP32. Prints CSV, and to stderr what the biases are like.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pandas as pd

from qerl_core.checks import require
from qerl_core.exits import guarded
from qerl_core.process.arguments import KeyValueParser
from qerl_core.seeding import derive

ANSWERS = Path(__file__).resolve().parents[1] / "real-2026" / "first-look" / "data"
ASKED = [(kind, part) for kind in ("fp8", "int8", "nvfp4") for part in ("keys", "keys, biases apart")]
ASKED += [("nvfp4", "values")]


def main(arguments: list[str] | None = None) -> None:
    parser = KeyValueParser(__doc__)
    parser.add_argument("--size", default="05b", choices=("05b", "15b"), help="whose answers to read (default: 05b)")
    parser.add_argument("--copies", type=int, default=3, help="of the file, at most 12 (default: 3)")
    parser.add_argument("--answers", type=int, default=3, help="of a copy, at most 8 (default: 3)")
    parser.add_argument("words", nargs="+", help="of a run: where model and data are")
    options = parser.parse_args(arguments)
    import torch

    answers: Any = pd.read_parquet(ANSWERS / f"formats-{options.size}" / "probe_answers.parquet")
    answers = answers[(answers["quant"] == "bf16") & (answers["temperature"] == 1) & answers["completion"].notna()]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["copy", "kind", "rounded", "kl"])
    for copy in range(1, options.copies + 1):
        of_copy = answers[answers["base"] == copy].head(options.answers)
        with torch.inference_mode():
            for row in measured([*options.words, f"model.dither={copy}"], of_copy):
                writer.writerow([copy, *row])
                sys.stdout.flush()


def measured(words: list[str], answers: Any) -> Iterator[tuple[str, str, str]]:
    """Kind, what is rounded to it, and KL, for a copy."""
    from qerl_bench.config import build, compose
    from qerl_bench.model_setup import base_checkpoint, build_policy
    from qerl_bench.probe.scoring import kl, passes, scores

    fixed = ["model=hub", "model.dtype=float32", "task=gsm8k", "task.answer_format=boxed", "device=cpu", "kernel=torch"]
    experiment: Any = build(compose([*fixed, "train.kv=nvfp4", *words]))
    policy: Any = build_policy(experiment, base_checkpoint(experiment.model, experiment.task, experiment.root), "cpu")
    prompts = {one.id: policy.ids_of(one) for one in experiment.task.train_prompts(1, 512, derive("probe"))}
    texts: Any = []
    for question, text in zip(answers["question"], answers["completion"], strict=True):
        ids = [*policy.tokenizer(text, add_special_tokens=False)["input_ids"], policy.tokenizer.eos_token_id]
        texts.append(type("Text", (), {"prompt_ids": prompts[question], "token_ids": ids}))
    biases = biases_of(policy.model)
    tokens = sum(len(one.token_ids) for one in texts)
    sums: dict[tuple[str, str], float] = {}
    for one in passes(texts):
        with policy.kv.off():
            known = scores(policy, one)
        for kind, part in ASKED:
            policy.kv.kind, policy.kv.parts = kind, frozenset({part.partition(",")[0]})
            with biases_apart(policy, biases) if part.endswith("apart") else nullcontext():
                sums[kind, part] = sums.get((kind, part), 0.0) + kl(known, scores(policy, one))
    for (kind, part), total in sums.items():
        yield kind, part, f"{total / tokens:.6g}"


def biases_of(model: Any) -> dict[int, Any]:
    """The bias (KV, D) of the keys of each layer."""
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found = {}
    for name, module in model.named_modules():
        if name.endswith("k_proj") and getattr(module, "bias", None) is not None:
            layer = int(next(part for part in name.split(".") if part.isdigit()))
            found[layer] = module.bias.view(-1, width)
            largest = module.bias.abs().max().item()
            print(f"block {layer}: the largest bias of keys is {largest:.1f}", file=sys.stderr)
    require(bool(found), "the keys of this model have no biases: choose one of the family Qwen2")
    return found


@contextmanager
def biases_apart(policy: Any, biases: dict[int, Any]) -> Iterator[None]:
    """Context in which keys are rounded without the rotated bias of their layer, which is added again behind it."""
    import torch

    (rotary,) = [module for name, module in policy.model.named_modules() if name.endswith("rotary_emb")]
    seen: list[Any] = []
    hook = rotary.register_forward_hook(lambda module, inputs, output: seen.append(output))
    kv, attended = policy.kv, policy.kv.attended

    def apart(layer: int, key: Any, value: Any) -> tuple[Any, Any]:
        cos, sin = (one[:1, None] for one in seen[-1])  # (1, 1, T, D): rows are padded behind, so positions are equal
        bias = biases[layer][None, :, None]
        first, second = bias.chunk(2, -1)
        rotated = bias * cos + torch.cat((-second, first), -1) * sin
        rounded, value = attended(layer, key - rotated, value)
        return rounded + rotated, value

    kv.attended = apart
    try:
        yield
    finally:
        kv.attended = attended
        hook.remove()


if __name__ == "__main__":
    guarded(main)
