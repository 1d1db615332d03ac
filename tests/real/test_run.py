"""A pretrained model out of a GGUF file goes through the harness, and answers in English."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_bench.model.gguf.convert import converted
from tests.e2e.test_run import run, run_dirs

SMALL = ("rollout.prompts_per_step=2", "rollout.group_size=4", "task.max_completion_tokens=48", "eval=none")


def test_three_steps_on_arithmetic(smollm: Path, tmp_path: Path) -> None:
    words = ["model=hub", f"model.id={smollm}", "task=arithmetic", "quant=nvfp4", "aqn=exp", "steps=3", *SMALL]
    done = run(*words, f"root={tmp_path}", timeout=1800)
    assert done.returncode == 0, done.stderr
    (folder,) = run_dirs(tmp_path)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert all(math.isfinite(record["loss"]) for record in steps if "loss" in record)
    env = json.loads((folder / "env.json").read_text())
    assert env["gguf"]["bits_per_weight"] == 5.0 and env["gguf"]["tied"]


def test_its_answer_ends(smollm: Path, tmp_path: Path) -> None:
    folder = converted(smollm, None, "float32", tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    inputs = tokenizer(asked, return_tensors="pt", add_special_tokens=False)
    ids = model.generate(**inputs, max_new_tokens=64, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(ids) and ids[-1] in model.generation_config.eos_token_id
