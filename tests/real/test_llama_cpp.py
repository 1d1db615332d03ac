"""Each architecture computes what llama.cpp does: equal tokens, and log-probabilities within 1e-3 nats.

Most gaps are below 1e-4. Gemma's are larger, since llama.cpp looks its GELU up in a table of 16-bit numbers: without
what that feeds, the gap is 3e-6. A window that is one token off makes a gap of 1, another theta one above 0.01.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_bench.model.gguf.convert import converted, record_of
from tests.models.gguf_files import model_of, write
from tests.models.test_gguf import CASES, MIXED
from tests.models.test_gguf_tokenizer import TEXTS, sentencepiece_keys
from tests.real.llama_cpp_peer import Peer, f32_copy, logprobs

GAP = 1e-3  # nats
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, there was",
    "Q: What is 17 * 3?\nA:",
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell?",
    "日本の首都は",
    "Привет, как",
    "Dear Sir or Madam,",
    "SELECT name FROM",
    "Water boils at",
    "The quick brown fox",
    "import numpy as np\n",
    "<html>\n<body>",
    "x = [1, 2, 3]",
    "In 1969, astronauts",
    "A recipe for bread:\n1.",
    "H2O is",
    "To be, or not to be,",
    "2 + 2 =",
    "The answer is \\boxed{",
]
LONG = " ".join(f"Fact {number}: {number} times {number} is {number * number}." for number in range(1, 14))


def compare(file: Path, folder: Path, prompts: list[str]) -> tuple[float, int]:
    """The largest gap of log-probabilities, and the number of prompts whose tokens differ."""
    made = converted(file, None, "float32", folder / "cache")
    record = record_of(made)
    assert record is not None
    tokenizer = AutoTokenizer.from_pretrained(made)
    model: Any = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()
    peer = Peer(f32_copy(file, folder / "f32.gguf", record["tied"]))
    gap, differ = 0.0, 0
    for prompt in prompts:
        ids = tokenizer(prompt)["input_ids"]
        differ += ids != peer.ids(prompt)
        gap = max(gap, float((logprobs(model, ids) - peer.logprobs(ids)).abs().max()))
    return gap, differ


@pytest.mark.parametrize(("case", "kinds"), [*((case, "F32") for case in CASES), ("llama", "mixed")])
def test_each_architecture(case: str, kinds: str, tmp_path: Path) -> None:
    make, words = CASES[case]
    words = {**words, "extra": {name: tensor() for name, tensor in words.get("extra", {}).items()}}
    file = write(tmp_path / "x.gguf", make(), "F32" if kinds == "F32" else MIXED, **words)
    gap, differ = compare(file, tmp_path, [*PROMPTS[:-1], LONG])
    assert differ == 0 and gap < GAP


def test_gemma_without_gelu(tmp_path: Path) -> None:
    model = model_of("gemma3_text")
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.zero_()
    gap, differ = compare(write(tmp_path / "x.gguf", model), tmp_path, [*PROMPTS[:-1], LONG])
    assert differ == 0 and gap < GAP / 20


def test_smollm2(smollm: Path, tmp_path: Path) -> None:
    gap, differ = compare(smollm, tmp_path, PROMPTS)
    assert differ == 0 and gap < GAP


def test_tokens_of_smollm2(smollm: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted(smollm, None, "bfloat16", tmp_path))
    peer = Peer(smollm)
    source = Path(__file__).read_text()
    texts = [*TEXTS, *(source[start : start + 60] for start in range(0, len(source), 15))]
    assert len(texts) > 200
    assert [text for text in texts if tokenizer(text)["input_ids"] != peer.ids(text)] == []


def test_sentencepiece(tmp_path: Path) -> None:
    keys = sentencepiece_keys()
    file = write(
        tmp_path / "x.gguf", model_of("gemma3_text", vocab_size=len(keys["tokens"])), tokenizer=keys, template=None
    )
    prompts = ["abc", "cab abc  aab", "   ", "aabbccabc", " a ab", "é漢", "ab\nc", "a   b", "cabcabcab", "x", *PROMPTS]
    gap, differ = compare(file, tmp_path, prompts)
    assert differ == 0 and gap < GAP
