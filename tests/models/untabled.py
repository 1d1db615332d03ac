"""Architectures that docs/models.md does not list: each computes what transformers does, or is refused before a step.

python -m tests.models.untabled                # tries all, writes docs/models-untabled.csv; exit code 1 if one is wrong
python -m tests.models.untabled mamba rwkv     # shows these, writes nothing

A try is a run of `cell` without noise, on a tiny random checkpoint, repeated with the option that a refusal asks for.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers

from qerl_core.checks import ConfigError, TrainingStopped
from tests.models import builds
from tests.models.cell import examine, first_sentence

TABLE = Path(__file__).resolve().parents[2] / "docs" / "models-untabled.csv"
FORMATS = ("nvfp4", "bf16")
ASKED = re.compile(r"\b(lora\.targets=\[[\w,]+\]|quant\.partial=true|train\.packing=false)")

GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024}
SMALL_STATE = {"state_size": 16, "time_step_rank": 16}
TOP_2_OF_4 = {"num_experts": 4, "num_experts_per_tok": 2}
TOP_2_OF_4_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
GROUPED = {**builds.ROUTED, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
UNTABLED: dict[str, dict[str, Any]] = {
    "mamba": SMALL_STATE,
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    "falcon_mamba": SMALL_STATE,
    "recurrent_gemma": {"lru_width": 64, "attention_window_size": 16},
    "rwkv": {"attention_hidden_size": 64},
    "xlstm": {},
    "jamba": {
        **TOP_2_OF_4,
        "mamba_dt_rank": 16,
        "mamba_d_state": 16,
        "use_mamba_kernels": False,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "olmo_hybrid": {},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "block_size": 16},
    "doge": {"keep_window_size": builds.WINDOW},  # without more tokens than that its dt_proj has no effect
    "bloom": {"n_layer": 2, "n_head": 4, "hidden_size": 64},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 1024},
    "gptj": {**GPT, "rotary_dim": 8},
    "codegen": {**GPT, "rotary_dim": 8, "n_ctx": 1024},
    "gpt_bigcode": GPT,
    "openai-gpt": GPT,
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "num_layers": 2,
        "num_heads": 4,
        "hidden_size": 64,
        "window_size": builds.WINDOW,
    },
    "gpt_neox": {},
    "xglm": {"d_model": 64, "ffn_dim": 128, "num_layers": 2, "attention_heads": 4},
    "ctrl": {"n_embd": 64, "dff": 128, "n_layer": 2, "n_head": 4, "n_positions": 1024},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "falcon": {},
    "biogpt": {},
    "persimmon": {},
    "olmo": {},
    "gemma": {},
    "vaultgemma": {},
    "cohere": {},
    "glm": {},
    "jais2": {},
    "cwm": {},
    "hyperclovax": {},
    "youtu": builds.MLA,
    "diffllama": {"attention_dropout": 0.0},
    "modernbert-decoder": {},
    "qwen2_moe": builds.SWITCHED_EXPERTS | {"num_experts": 4},
    "phimoe": TOP_2_OF_4_LOCAL,
    "jetmoe": {**TOP_2_OF_4_LOCAL, "kv_channels": 16, "num_key_value_heads": 4},
    "granitemoeshared": {**builds.GRANITE, **TOP_2_OF_4_LOCAL, "shared_intermediate_size": 64},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64, "moe_num_shared_experts": 1},
    "deepseek_v2": {
        **builds.MLA,
        **builds.ROUTED,
        "first_k_dense_replace": 1,
        "n_group": None,
        "topk_group": None,
    },
    "dots1": GROUPED,
    "exaone_moe": {**TOP_2_OF_4, "num_shared_experts": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 1},
    "solar_open": builds.ROUTED,
    "flex_olmo": TOP_2_OF_4,
    "afmoe": {**TOP_2_OF_4, **builds.SLIDING, "moe_intermediate_size": 64},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {**CONVOLUTION, **TOP_2_OF_4, "moe_intermediate_size": 64, "num_dense_layers": 1},
}


@dataclass(frozen=True, kw_only=True)
class Tried:
    """`verdict` is works, refused before the first step, or wrong: what is not told before a step is computed."""

    architecture: str
    quant: str
    verdict: str
    options: str  # that refusals asked for
    gap: str  # nats between sampler and trainer, the largest of two steps
    reason: str


def tried(name: str, quant: str, checkpoint: Path, root: Path) -> Tried:
    options = ["aqn=none"]
    while True:
        verdict, reason, asked = "works", "", None
        with tempfile.TemporaryDirectory(dir=root) as folder:
            try:
                examine(checkpoint, Path(folder), quant, options)
            except (ConfigError, TrainingStopped) as error:
                verdict, reason = "refused", first_sentence(error)
                asked = next((word for word in ASKED.findall(str(error)) if word not in options), None)
            except Exception as error:  # whatever an architecture makes the program run into
                verdict, reason = "wrong", f"{type(error).__name__}: {first_sentence(error)}"
            gaps = gaps_of(Path(folder))
        if verdict == "refused" and gaps:
            verdict, reason = "wrong", f"refused after a step: {reason}"
        elif asked is not None:
            options.append(asked)
            continue
        gap = f"{max(gaps):.1e}" if gaps else ""
        return Tried(
            architecture=name, quant=quant, verdict=verdict, options=" ".join(options[1:]), gap=gap, reason=reason
        )


def gaps_of(root: Path) -> list[float]:
    """The largest difference of a log-probability in each step that a run has made."""
    file = root / "runs" / "run" / "metrics.jsonl"
    records = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    return [record["mismatch/logp_abs_max"] for record in records if record["kind"] == "train"]


def row(name: str) -> list[Tried]:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    builds.ARCHITECTURES[name] = deepcopy(UNTABLED[name])  # transformers writes into it
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        checkpoint = builds.build(name, Path(folder) / "model" / f"a-{name}")
        return [tried(name, quant, checkpoint, Path(folder)) for quant in FORMATS]


def main(names: list[str]) -> int:
    found: list[Tried] = []
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        for tries in pool.map(row, names or UNTABLED):
            found += tries
            print(*("  ".join(filter(None, asdict(one).values())) for one in tries), sep="\n", flush=True)
    if not names:
        with open(TABLE, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([[field.name for field in fields(Tried)], *(asdict(one).values() for one in found)])
    return int(any(one.verdict == "wrong" for one in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
