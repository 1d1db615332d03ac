"""What a run has trained, as one plain checkpoint: transformers computes with it what the policy computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_bench.commands.export import main
from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build
from qerl_bench.model.merged_checkpoint import export_merged
from qerl_core.checks import ConfigError

IDS = torch.tensor([[3, 200, 17, 44, 101, 7]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


@pytest.mark.parametrize("quant", ["bf16", "nvfp4", "mxfp4", "mxfp8", "nf4", "int4"])
def test_transformers_computes_what_the_policy_computes(make_policy: Any, tmp_path: Path, quant: str) -> None:
    policy = make_policy("lora.train_norms=true", quant=quant, width=64, sharp=True, adapted=True)
    with torch.no_grad():
        for norm in policy.norms.values():
            norm.weight.mul_(1.1)
    assert export_merged(policy, torch.float32, tmp_path / "out") < 1e-6
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.dtype == torch.float32
    torch.testing.assert_close(logits(found), logits(policy.model), atol=2e-4, rtol=1e-4)
    with policy.without_adapter():
        assert (logits(found) - logits(policy.model)).abs().max() > 1
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("12+3").input_ids == policy.tokenizer("12+3").input_ids


def test_rounding_is_told_as_a_share_of_the_update(make_policy: Any, tmp_path: Path) -> None:
    policy = make_policy(width=64, adapted=True)
    share = export_merged(policy, torch.bfloat16, tmp_path / "whole")
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.01)
    small = export_merged(policy, torch.bfloat16, tmp_path / "small")
    assert 0.001 < share < 0.05 < small < 1
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "small").dtype == torch.bfloat16


def test_the_command_merges_a_run(make_config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = make_config("quant=mxfp4", f"root={tmp_path}", "name=done", "eval=none", "task=even_characters")
    run_experiment(build(cfg), cfg)
    run, out = tmp_path / "runs" / "done", tmp_path / "out"
    capsys.readouterr()
    main([str(run), f"out={out}", "checkpoint=2", "dtype=bfloat16"])
    assert "step_000002" in capsys.readouterr().out
    AutoModelForCausalLM.from_pretrained(out)
    for words, message in {
        (f"out={out}",): "exists and is not an empty folder",
        ("out=x", "checkpoint=3"): "checkpoint=3 must be",
        ("out=x", "checkpoint=1", "checkpoint=2"): "checkpoint=1 checkpoint=2: a key is given twice",
        ("out=x", "device=cuda:7"): "device must be one of .* got 'cuda:7'",
        ("out=x", "dtype=bf16"): "dtype must be one of .* got 'bf16'",
        ("out=x", "task=math"): "task is no key of this command",
        (): "out= must be given",
    }.items():
        with pytest.raises(ConfigError, match=message):
            main([str(run), *words])


def test_a_run_trained_in_a_rounded_whole_has_no_other_form(make_config: Any, tmp_path: Path) -> None:
    words = ("quant=mxfp4", "rollout.merge=true", "train.merge=ste", "steps=1")
    cfg = make_config(*words, f"root={tmp_path}", "name=done", "eval=none", "task=even_characters")
    run_experiment(build(cfg), cfg)
    with pytest.raises(ConfigError, match=r"rounded together.*quant=mxfp4"):
        main([str(tmp_path / "runs" / "done"), f"out={tmp_path / 'out'}"])


def test_a_run_without_adapter_has_its_model_already(make_policy: Any, tmp_path: Path) -> None:
    policy = make_policy("lora=none", "model.dtype=float32", quant="bf16")
    with pytest.raises(ConfigError, match=r"checkpoints/step_\*/model"):
        export_merged(policy, torch.float32, tmp_path / "out")
