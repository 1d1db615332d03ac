"""What is published shows no folder, user, machine, mail address or key; what it needs is left as it is."""

from __future__ import annotations

import pytest

from qerl_core.metrics.definitions import definitions
from qerl_studies.runs.private import Private

ALICE = Private("alice", "node-17.cluster.example.org")
TOKEN = "hf_" + "aB3" * 12


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/alice/models/qwen", "<path>/qwen"),
        ("/home/bob", "<path>"),
        ("/root", "<path>"),
        ("/root/code/x.py", "<path>/x.py"),
        ("file:///data/mine/options", "<path>/options"),
        ("--config-dir=/Users/carol/opts", "--config-dir=<path>/opts"),
        ("run-of-alice_2", "run-of-<user>_2"),
        ("on node-17", "on <host>"),
        ("node-17.cluster.example.org", "<host>"),
        ("carol@lab.example.com", "<mail>"),
        (f"key {TOKEN}", "key <key>"),
        ("https://carol:pw123456@host.org/x", "https://<key>@host.org/x"),
        ("WANDB_API_KEY=0123456789abcdef", "WANDB_<key>"),
    ],
)
def test_private_things_are_hidden(text: str, shown: str) -> None:
    assert ALICE.found(text) != []
    assert ALICE.hidden(text) == shown
    assert ALICE.found(shown) == []


@pytest.mark.parametrize(
    "text",
    [
        "alice/qwen3-lora", "Qwen/Qwen3-4B", "https://huggingface.co/datasets/openai/gsm8k", "malice", "1e-5",
        "Linux-6.18.44-x86_64-with-glibc2.36", "tiny-nvfp4-exp-grpo-r32-s0-0f0f0f0f", *definitions().values(),
    ],
)  # fmt: skip
def test_the_rest_stays(text: str) -> None:
    assert ALICE.hidden(text) == text and ALICE.found(text) == []


def test_trees_are_searched_keys_included() -> None:
    tree = {"own_code": {"/home/alice/mine/a.py": "0f"}, "words": ["alice", 3, None]}
    assert ALICE.hidden(tree) == {"own_code": {"<path>/a.py": "0f"}, "words": ["<user>", 3, None]}


def test_names_that_say_nothing_stay() -> None:
    assert Private("root", "localhost").hidden("root of localhost") == "root of localhost"
