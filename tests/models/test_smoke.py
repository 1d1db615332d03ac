"""experiment=smoke on a model without a file in conf/: noise, gradient and mismatch of its run are not zero."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build, compose
from tests.models import builds


@pytest.mark.usefixtures("no_figures")
def test_smoke_takes_any_folder(tmp_path: Path) -> None:
    checkpoint = builds.build("qwen3_moe", tmp_path / "checkpoint")
    words = ["experiment=smoke", "model=hub", f"model.id={checkpoint}", "quant=nvfp4", "aqn=constant", "eval=none"]
    cfg = compose([*words, "device=cpu", f"root={tmp_path}"])
    experiment = build(cfg)
    run_experiment(experiment, cfg)
    lines = (experiment.run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    for record in steps:
        assert record["grad_norm"] > 0 and record["reward/frac_zero_std"] == 0
        assert record["aqn/norms_perturbed"] == 4 and record["mismatch/noise_logp_abs_max"] > 0
